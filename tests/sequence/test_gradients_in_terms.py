"""What a cut sequence leaves of gradients is summed with what the data leave of them, not one by one."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import parallelize_context, parallelize_fsdp, parallelize_replicate
from shardwright.testing import rank_mesh
from tests.witness.witness import Witness

TERM = sw.Partial("sum")


def _layers(depth):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)])


def _placed(depth, data):
    mesh = rank_mesh((2, 2), ("dp", "cp"))
    model = parallelize_context(_layers(depth), mesh["cp"])
    match data:
        case "replicate":
            return mesh, parallelize_replicate(model, mesh["dp"])
        case "fsdp":
            return mesh, parallelize_fsdp(model, mesh["dp"])
        case "fsdp over all":
            return mesh, parallelize_fsdp(model, mesh["dp", "cp"]._flatten("dp_cp"))
    raise ValueError(data)


def _batch():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def _one_device(depth, passes=1):
    model = _layers(depth)
    for _ in range(passes):
        model(_batch()).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _differing(model, wanted):
    return [
        name
        for name, p in model.named_parameters()
        if not torch.allclose(p.grad.full_tensor(), wanted[name], rtol=1e-4, atol=1e-5)
    ]


def _messages(depth, data):
    """How many messages a backward and a synchronisation ask for, where gradients lie, and what is wrong."""
    mesh, model = _placed(depth, data)
    loss = model(_batch()[mesh.get_local_rank("dp")][None]).square().sum()
    with Witness() as backward:
        loss.backward()
    lie = {tuple(p.grad.placements) for p in model.parameters()}
    wrong = _differing(model, _one_device(depth))
    with Witness() as synchronised:
        GradientSynchronizer(model).synchronize()
    return (
        len(backward.asked),
        len(synchronised.asked),
        lie,
        wrong + _differing(model, _one_device(depth)),
        {p.to_local().numel() for p in model.parameters()},
    )


LIE = {"replicate": {(TERM, TERM)}, "fsdp": {(sw.Shard(0), TERM)}, "fsdp over all": {(sw.Shard(0),)}}


@pytest.mark.parametrize("data", LIE)
def test_a_backward_sends_nothing_for_each_parameter(ranks, data):
    few, many = ranks(4, _messages, 1, data)[0], ranks(4, _messages, 5, data)[0]
    assert few == many
    _, _, lie, wrong, _ = many
    assert (lie, wrong) == (LIE[data], [])


def test_units_over_both_axes_hold_a_quarter_and_leave_nothing_to_sum(ranks):
    *_, held = ranks(4, _messages, 1, "fsdp over all")[0]
    assert held == {2 * 8, 2}


def _accumulated(data):
    mesh, model = _placed(3, data)
    for _ in range(3):
        model(_batch()[mesh.get_local_rank("dp")][None]).square().sum().backward()
    wrong = _differing(model, _one_device(3, 3))
    norm = clip_grad_norm_(model.parameters(), 1e9)
    expected = torch.cat([g.flatten() for g in _one_device(3, 3).values()]).norm()
    return wrong, torch.allclose(norm, expected, rtol=1e-4)


@pytest.mark.parametrize("data", LIE)
def test_backwards_add_up(ranks, data):
    assert ranks(4, _accumulated, data) == [([], True)] * 4


class _Net(nn.Module):
    """A layer that is used, one read beside the cut sequence, and one that no rank uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.beside, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x).square().sum() + self.beside.weight.square().sum() / 4


def _read_beside(data):
    """Half of the term of the weights is each data rank's, so it counts once."""
    mesh, one = rank_mesh((2, 2), ("dp", "cp")), _Net()
    (one(_batch()) + one.beside.weight.square().sum() / 4).backward()
    model = parallelize_context(_Net(), mesh["cp"])
    if data == "replicate":
        parallelize_replicate(model, mesh["dp"])
    else:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        parallelize_fsdp(model, mesh["dp", "cp"]._flatten("dp_cp"), mp_policy=policy)
    model(_batch()[mesh.get_local_rank("dp")][None]).backward()
    GradientSynchronizer(model).synchronize()
    wanted = {name: p.grad for name, p in one.named_parameters()}
    used = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, gradient in wanted.items() if gradient is not None} == set(used)
    return [n for n, p in used.items() if not torch.allclose(p.grad.full_tensor(), wanted[n], rtol=1e-4)]


@pytest.mark.parametrize("data", ["replicate", "fsdp over all"])
def test_what_no_cut_reaches_counts_once(ranks, data):
    assert ranks(4, _read_beside, data) == [[]] * 4


def _over_some_of_the_ranks():
    mesh, said = rank_mesh((2, 2), ("dp", "cp")), []
    over_all = mesh["dp", "cp"]._flatten("dp_cp")
    cut = sw.distribute_module(_layers(1), mesh["cp"], {"0.0.weight": {"cp": sw.Shard(0)}})
    for model, strategy in (
        (parallelize_context(_layers(1), mesh["cp"]), parallelize_replicate),
        (cut, parallelize_fsdp),
    ):
        before = dict(model.named_parameters())
        with pytest.raises(ParallelError) as caught:
            strategy(model, over_all)
        assert dict(model.named_parameters()) == before
        said.append(str(caught.value))
    return said


def test_axes_that_hold_ranks_of_others_are_refused(ranks):
    for said in ranks(4, _over_some_of_the_ranks)[0]:
        assert "0.0.weight: it is placed on ('cp',), which are some of the ranks of ('dp_cp',)" in said
        assert "fix: take axes that share no ranks" in said
