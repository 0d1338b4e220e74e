"""The sequence of a part of a model is cut: what is outside has its whole gradient on each of these ranks."""

import pytest
import torch
from torch import nn

from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.moe import MoELayer
from shardwright.parallel import (
    parallelize,
    parallelize_context,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)
from shardwright.testing import rank_mesh
from tests.parallel.table.worlds import context


class _Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return (self.inner(x) * self.scale).tanh()


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.part, self.after = nn.Linear(8, 8), _Part(), _Part()

    def forward(self, x):
        return self.after(self.part(self.before(x))).square().sum()


def _batch():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def _differing(model, row):
    one = _Net()
    one(_batch()).backward()
    model(_batch()[row][None]).backward()
    GradientSynchronizer(model).synchronize()
    wanted = {name: p.grad for name, p in one.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model, 1e9), norm, rtol=1e-4, atol=0)
    return [
        name
        for name, p in model.named_parameters()
        if not torch.allclose(p.grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-5)
    ]


def _by_calls(data):
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    parallelize_context(model.part, mesh["cp"], output="whole")
    (parallelize_replicate if data == "replicate" else parallelize_fsdp)(model, mesh["dp"])
    return _differing(model, mesh.get_local_rank("dp"))


@pytest.mark.parametrize("data", ["replicate", "fsdp"])
def test_only_the_terms_of_the_part_are_summed_over_its_ranks(ranks, data):
    assert ranks(4, _by_calls, data) == [[]] * 4


OUTSIDE = {  # of a part whose sequence is cut over cp: dp_cp is of the data and context ranks together
    "replicate": lambda child, mesh, over_all: parallelize_replicate(child, over_all),
    "on two axes": lambda child, mesh, over_all: parallelize_replicate(child, mesh),
    "units": lambda child, mesh, over_all: parallelize_fsdp(child, over_all),
    "copies of units": lambda child, mesh, over_all: parallelize_hsdp(child, mesh, shard_dim="dp"),
    "data": lambda child, mesh, over_all: parallelize_fsdp(child, mesh["dp"]),
    "data replicated": lambda child, mesh, over_all: parallelize_replicate(child, mesh["dp"]),
}


def _beside_units(name):
    """The part is a unit over all ranks, and what is outside is placed by calls of its own."""
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    over_all = mesh["dp", "cp"]._flatten("dp_cp")
    parallelize_context(model.part, mesh["cp"], output="whole")
    parallelize_fsdp(model.part, over_all)
    for child in (model.before, model.after):
        OUTSIDE[name](child, mesh, over_all)
    return _differing(model, mesh.get_local_rank("dp"))


@pytest.mark.parametrize("name", ["data", "data replicated"])
def test_beside_a_unit_over_all_ranks_data_ranks_are_enough(ranks, name):
    assert ranks(4, _beside_units, name) == [[]] * 4


def _outside(name, data, source):
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    over_all = mesh["dp", "cp"]._flatten("dp_cp")
    parallelize_context(model.part, mesh["cp"], output="whole")
    data(model.part, mesh["dp"])
    for child in (model.before, model.after):
        OUTSIDE[name](child, mesh, over_all)
    with pytest.raises(ParallelError) as caught:
        GradientSynchronizer(model if source == "module" else model.named_parameters())
    model(_batch()[mesh.get_local_rank("dp")][None]).backward()
    before = [p.detach().to_local().clone() for p in model.parameters()]
    with pytest.raises(ParallelError, match="which read the same rows as this one"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(map(torch.equal, before, (p.to_local() for p in model.parameters())))
    return str(caught.value)


@pytest.mark.parametrize("data", [parallelize_replicate, parallelize_fsdp])
@pytest.mark.parametrize("name", ["replicate", "on two axes", "units", "copies of units"])
def test_what_is_outside_and_counts_these_ranks_as_data_is_refused(ranks, name, data):
    for rank, said in enumerate(ranks(4, _outside, name, data, "module" if "on" in name else "parameters")):
        assert said.startswith("before.weight, before.bias, after.scale, after.inner.weight and 1 more: ")
        assert f"summed over ranks [{rank ^ 1}] too, which read the same rows as this one" in said
        assert "the sequence that is cut where part.scale computes" in said
        assert "fix: parallelize_context of the module that holds both" in said


def _alone():
    mesh, model = rank_mesh((2,), ("cp",)), _Net()
    parallelize_context(model.part, mesh, output="whole")
    for child in (model.before, model.after):
        parallelize_replicate(child, mesh)
    with pytest.raises(ParallelError, match="which read the same rows as this one"):
        GradientSynchronizer(model)


def test_what_is_outside_is_refused_also_where_nobody_reads_other_rows(ranks):
    ranks(2, _alone)


def _units_of_all():
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    over_all = mesh["dp", "cp"]._flatten("dp_cp")
    parallelize_context(model, mesh["cp"])
    for unit in (model.part, model):
        parallelize_fsdp(unit, over_all)
    return _differing(model, mesh.get_local_rank("dp"))


def test_units_over_all_ranks_take_parameters_without_dims_by_calls(ranks):
    assert ranks(4, _units_of_all) == [[]] * 4


TABLES = {
    "a part, fsdp": {"part": {"context": {"output": "whole"}}, "": "fsdp"},
    "a part, units": {"part": [{"context": {"output": "whole"}}, "fsdp"], "": "fsdp"},
    "all, fsdp": {"": ["context", "fsdp"]},
    "all, units": {"": ["context", "fsdp"], "part": "fsdp"},
    "all, copies of units": {"": ["context", "hsdp"], "part": "hsdp"},
}


def _by_table(name):
    data = {"data_parallel_replicate": 2} if "copies" in name else {"data_parallel_shard": 2}
    at, model = context(**data, context_parallel_shard=2), _Net()
    parallelize(model, at, TABLES[name], report=None)
    return _differing(model, at.mesh_for("batch")["dp"].get_local_rank())


@pytest.mark.parametrize("name", TABLES)
def test_a_table_sums_each_gradient_once_also_of_parameters_without_dims(ranks, name):
    assert ranks(4, _by_table, name) == [[]] * 4


def _over_all(which):
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    over_all = mesh["dp", "cp"]._flatten("dp_cp")
    parallelize_context(model.part, mesh["cp"], output="whole")
    if which == "units":
        parallelize_fsdp(model.part, over_all)
    if which == "in another dtype":
        model.double()
    if which == "assigned":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    before = dict(model.named_parameters())
    with pytest.raises(ParallelError) as caught:
        parallelize_fsdp(model, over_all)
    assert dict(model.named_parameters()) == before
    return str(caught.value)


@pytest.mark.parametrize("which", ["root", "units", "in another dtype", "assigned"])
def test_units_that_would_count_what_is_outside_once_for_each_rank_are_refused(ranks, which):
    for said in ranks(4, _over_all, which):
        assert (
            "before.weight: ('dp_cp',) holds the ranks of ('cp',), which cut the activations of a part"
            in said
        )
        assert "fix: parallelize_context of the model that holds both" in said


def _replicated_before():
    mesh, model = rank_mesh((2, 2), ("dp", "cp")), _Net()
    parallelize_replicate(model, mesh["dp", "cp"]._flatten("dp_cp"))
    with pytest.raises(ParallelError) as caught:
        parallelize_context(model.part, mesh["cp"], output="whole")
    return str(caught.value)


def test_a_part_of_what_counts_these_ranks_as_data_is_refused(ranks):
    for said in ranks(4, _replicated_before):
        assert "scale: it is replicated on ('dp_cp',), which hold the ranks of ('cp',)" in said
        assert "fix: parallelize_context first" in said


class _Routed(_Net):
    """A layer of experts in the part whose sequence is cut, or after it."""

    def __init__(self, inside):
        super().__init__()
        if inside:
            self.part.inner = nn.Sequential(self.part.inner, MoELayer(8, 8, 4, 2))
        else:
            self.after = nn.Sequential(MoELayer(8, 8, 4, 2), self.after)
        for number, parameter in enumerate(self.parameters()):
            draw = torch.Generator().manual_seed(number)
            parameter.data = torch.rand(parameter.shape, generator=draw) - 0.4


def _routed(inside, source):
    at = context(data_parallel_shard=2, context_parallel_shard=2, expert_parallel=2)
    model, one, regular = _Routed(inside), _Routed(inside), at.mesh_for("regular")
    experts = at.mesh_for("expert")["ep_replicate", "ep_shard"]
    if source == "context first":
        parallelize_context(model.part, regular["cp_shard"], output="whole")
    parallelize_expert_parallel(model, experts)
    if source != "context first":
        parallelize_context(model.part, regular["cp_shard"], output="whole")
    parallelize_replicate(model, regular["dp_shard"])
    if source == "in another dtype":
        model, one = model.double(), one.double()
    if not inside:
        with pytest.raises(ParallelError, match=r"after.0.router.weight.* that is cut where part"):
            GradientSynchronizer(model if source == "module" else model.named_parameters())
        return []
    synchronizer = GradientSynchronizer(model if source == "module" else model.parameters())
    batch = _batch().to(one.before.weight.dtype)
    one(batch).backward()
    model(batch[regular.get_local_rank("dp_shard")][None]).backward()
    synchronizer.synchronize()
    pairs = zip(model.named_parameters(), one.parameters(), strict=True)
    return [
        n for (n, p), q in pairs if not torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-5)
    ]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("source", ["module", "parameters", "context first", "in another dtype"])
def test_experts_count_these_ranks_as_data_inside_of_the_cut_part_only(ranks, inside, source):
    assert ranks(4, _routed, inside, source) == [[]] * 4
