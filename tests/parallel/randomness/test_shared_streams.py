"""What is drawn for a distributed tensor after `context.seed` has parted the streams: alike on all copies."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import shardwright as sw
from shardwright.comm.record import Recorder
from shardwright.context import DENSE_DOMAIN
from shardwright.context.randomness import forget_streams
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize, parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from tests.parallel.table.worlds import context

DEGREES = {
    "replicate": {"data_parallel_replicate": 2},
    "hsdp": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "fsdp": {"data_parallel_shard": 2},
}


class _Noisy(torch.optim.SGD):
    """Steps of a Langevin kind: with noise on the parameters."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.1)


def _copies(x):
    """The parts that all ranks hold, by what they hold of the whole."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x.to_local().detach().flatten().tolist())
    return parts


def _trained(strategy, how, rows_everywhere):
    at = context(**DEGREES[strategy])
    at.seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    parallelize(model, at, {"": strategy})
    optimizer = _Noisy(model.parameters(), lr=0.1)
    for step in range(3):
        if how == "initialised" and step == 1:
            nn.init.normal_(model[2].weight)
            nn.init.trunc_normal_(model[0].weight)
        if rows_everywhere or at.rank == 0 or step != 1:
            model(torch.ones(2, 6)).square().sum().backward()
        GradientSynchronizer(model).synchronize()
        if how == "noise":
            optimizer.step()
        else:
            torch.optim.SGD.step(optimizer)
        optimizer.zero_grad()
    return [_copies(p) for p in model.parameters()], model[2].weight.full_tensor().tolist()


@pytest.mark.parametrize("how", ["initialised", "noise"])
@pytest.mark.parametrize("strategy", DEGREES)
def test_copies_of_a_parameter_stay_equal(ranks, strategy, how):
    degrees = DEGREES[strategy]
    n = degrees.get("data_parallel_replicate", 1) * degrees.get("data_parallel_shard", 1)
    found = ranks(n, _trained, strategy, how, True, timeout=60)
    assert all(each == found[0] for each in found)
    for parts in found[0][0]:
        assert len({str(part) for part in parts}) == degrees.get("data_parallel_shard", 1), parts


def test_a_rank_without_rows_draws_with_the_others(ranks):
    one, two = ranks(2, _trained, "replicate", "noise", False, timeout=60)
    assert one == two


def _sent():
    """What is drawn before streams part is that of one device; only copies that draw apart send anything."""
    at = context(data_parallel_replicate=2)
    mesh = at.mesh_for(DENSE_DOMAIN)["dp_replicate"]
    torch.manual_seed(3)
    with Recorder() as nobody_parted:
        alike = sw.randn(4, 3, device_mesh=mesh)
    torch.manual_seed(3)
    torch.testing.assert_close(alike.to_local(), torch.randn(4, 3), rtol=0, atol=0)
    at.seed(3)
    with Recorder() as parted:
        alike = sw.randn(4, 3, device_mesh=mesh)
        following = torch.randn(2)
    torch.manual_seed(3)
    torch.testing.assert_close(alike.to_local(), torch.randn(4, 3), rtol=0, atol=0)
    torch.testing.assert_close(following, torch.randn(2), rtol=0, atol=0)
    torch.manual_seed(at.rank)
    cut = sw.distribute_tensor(torch.zeros(4, 3), mesh, [sw.Shard(0)])
    whole = sw.distribute_tensor(torch.zeros(4, 3), mesh, [sw.Replicate()])
    with Recorder() as nothing:
        cut.normal_()
        whole.clone().normal_(generator=torch.Generator().manual_seed(1))
        nn.functional.dropout(cut + 1)
    drawn = {}
    own = torch.get_rng_state()
    for mode in ("full", "counter"):
        with sw.random_mode(mode):
            drawn[mode] = [
                whole.clone().normal_(),
                sw.rand(3, device_mesh=mesh),
                nn.functional.dropout(whole + 1),
                torch.bernoulli(whole + 0.5),
                torch.rand_like(whole),
            ]
    kept = torch.equal(own, torch.get_rng_state()) == (at.rank == 1)  # the first goes on, not the other
    with pytest.raises(Exception, match="draw outside of what is compiled"):  # in an error of Dynamo's
        torch.compile(lambda x: x.clone().normal_(), backend="eager")(whole)
    values = [[x.to_local().tolist() for x in each] for each in drawn.values()]
    return [len(r.collectives) for r in (nobody_parted, parted, nothing)], kept, values


def test_only_copies_that_draw_apart_send_their_stream(ranks):
    one, two = ranks(2, _sent, timeout=60)
    assert one == two
    assert one[:2] == ([0, 1, 0], True)


def _idioms():
    """Draws for a parameter outside of a forward, with gradients switched on."""
    at = context(data_parallel_replicate=2)
    at.seed(0)
    model = nn.Linear(4, 3)
    parallelize(model, at, {"": "replicate"})
    model(torch.ones(2, 4))
    weight = model.weight
    drawn = [
        weight.data.normal_(0, 0.02),
        weight.data.add_(torch.randn_like(weight.data)),
        weight.detach().uniform_(),
        weight.data.new_empty(3, 4).normal_(),
        nn.functional.dropout(weight.data),
    ]
    prune.random_unstructured(model, "weight", 0.5)
    return [_copies(x) for x in (*drawn, model.weight_mask)]


def test_copies_are_drawn_alike_where_gradients_are_on(ranks):
    for found in ranks(2, _idioms):
        assert all(one == two for one, two in found)


def _seeded_apart(strategy):
    """Ranks that were seeded apart by hand, for their data, make their weights where they will lie."""
    at = context(**DEGREES[strategy])
    torch.manual_seed(at.rank)
    with torch.device("meta"):
        model = nn.Linear(6, 4)
    parallelize_by = {"replicate": parallelize_replicate, "hsdp": parallelize_hsdp, "fsdp": parallelize_fsdp}
    mesh = at.mesh_for(DENSE_DOMAIN)
    axes = {"replicate": "dp_replicate", "hsdp": ("dp_replicate", "dp_cp_shard"), "fsdp": "dp_cp_shard"}
    parallelize_by[strategy](model, mesh[axes[strategy]])
    model.to_empty(device="cpu")
    model.reset_parameters()
    if strategy == "replicate":
        model.weight.data.normal_()
    return [_copies(p) for p in model.parameters()]


@pytest.mark.parametrize("strategy", DEGREES)
def test_weights_of_ranks_that_were_seeded_apart_are_one(ranks, strategy):
    degrees = DEGREES[strategy]
    n = degrees.get("data_parallel_replicate", 1) * degrees.get("data_parallel_shard", 1)
    for parts in ranks(n, _seeded_apart, strategy)[0]:
        assert len({str(part) for part in parts}) == degrees.get("data_parallel_shard", 1), parts


class _Noise(nn.Module):
    """Noise on a weight, in a forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return x @ (self.weight + torch.randn_like(self.weight))


def _not_for_copies():
    """What sends nothing: ranks in one stream, tensors without copies, noise that no context parts."""
    at = context(tensor_parallel=2)
    at.seed(0)
    tp = at.mesh_for(DENSE_DOMAIN)["tp"]
    with Recorder() as together:
        sw.randn(3, device_mesh=tp)
        nn.functional.dropout(sw.ones(4, device_mesh=tp))
    at = context(data_parallel_replicate=2)
    at.seed(0)
    dp = at.mesh_for(DENSE_DOMAIN)["dp_replicate"]
    cut = sw.distribute_tensor(torch.full((4, 3), 0.5), dp, [sw.Shard(0)])
    with sw.random_mode("counter"), Recorder() as apart:
        torch.bernoulli(cut)
        torch.normal(cut, 1.0)
    with Recorder() as gathered:
        torch.poisson(cut)
    several = sw.distribute_tensor(torch.full((3, 4), 0.5), dp, [sw.Replicate()])
    row = sw.distribute_tensor(torch.full((4,), 99.0), dp, [sw.Shard(0)])
    torch.manual_seed(at.rank)
    assert len({str(copy) for copy in _copies(torch.normal(row, several))}) == 1
    torch.manual_seed(0)
    forget_streams()
    model = parallelize_replicate(_Noise(), dp)
    with Recorder() as alone:
        for _ in range(1 + at.rank):
            model(torch.eye(3))
    return [[c.op for c in r.collectives] for r in (together, apart, gathered, alone)]


def test_nothing_is_sent_where_no_copies_draw_apart(ranks):
    assert ranks(2, _not_for_copies, timeout=60) == [[[], [], ["all_gather"], []]] * 2


_NOISE_OF = {"itself": lambda w: w, "its data": lambda w: w.data, "detached": lambda w: w.detach()}


class _NoiseOf(_Noise):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        return x @ (self.weight + torch.randn_like(_NOISE_OF[self.of](self.weight)))


def _compiled_noise(of):
    at = context(data_parallel_replicate=2)
    at.seed(0)
    model = _NoiseOf(of)
    parallelize(model, at, {"": "replicate"})
    model(torch.eye(3))
    torch.compile(model, backend="aot_eager")(torch.eye(3)).sum().backward()
    return model.weight.grad is not None


@pytest.mark.parametrize("of", _NOISE_OF)
def test_a_graph_draws_noise_of_its_own(ranks, of):
    assert all(ranks(2, _compiled_noise, of))


def _in_a_forward(compiled):
    at = context(data_parallel_replicate=2)
    at.seed(0)
    model = _Noise()
    parallelize(model, at, {"": "replicate"})
    forward = model
    model(torch.eye(3))  # where streams part
    if compiled:
        forward = torch.compile(model, backend="aot_eager")
        forward(torch.eye(3))
    with Recorder() as recorder:
        made = forward(torch.eye(3))
    return len(recorder.collectives), made.tolist()


@pytest.mark.parametrize("compiled", [False, True])
def test_noise_in_a_forward_is_that_of_one_weight_unless_a_graph_draws_it(ranks, compiled):
    (sent, one), (_, two) = ranks(2, _in_a_forward, compiled)
    assert sent == (0 if compiled else 1)
    assert (one != two) is compiled
