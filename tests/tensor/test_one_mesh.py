"""Operands of a mesh and of its slices in one call: a number goes along, anything larger keeps its mesh."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, LayoutError, RuleError
from shardwright.parallel import parallelize_replicate, parallelize_tensor
from shardwright.testing.meshes import rank_mesh

from .cases import close

_VALUES = {name: torch.linspace(-3, 4, 24).roll(at).view(4, 6) for at, name in enumerate("abc")}


def _put(name: str) -> nn.Parameter:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    home = {"a": mesh, "b": mesh["tp"], "c": mesh["dp"]}[name]
    placements = [sw.Replicate(), sw.Shard(0)] if name == "a" else [sw.Shard(1)]
    return nn.Parameter(sw.distribute_tensor(_VALUES[name], home, placements))


def _clipped(foreach):
    """torch's own clipping: of a mesh and its slice in both orders, and of two slices."""
    for names in ("ab", "ba", "bac", "bc"):
        ours = [_put(name) for name in names]
        plain = [nn.Parameter(_VALUES[name].clone()) for name in names]
        for parameter in (*ours, *plain):
            parameter.grad = (parameter * 2).detach()
        norm = nn.utils.clip_grad_norm_(ours, 1.0, foreach=foreach)
        close(norm, nn.utils.clip_grad_norm_(plain, 1.0, foreach=foreach))
        for got, wanted in zip(ours, plain, strict=True):
            close(got.grad, wanted.grad)
            assert got.grad.device_mesh == got.device_mesh


@pytest.mark.parametrize("foreach", [None, False, True])
def test_gradients_of_a_mesh_and_of_its_slices_are_clipped_together(ranks, foreach):
    ranks(4, _clipped, foreach)


def _numbers():
    a, b = _put("a").detach(), _put("b").detach()
    close(a * b.sum(), _VALUES["a"] * _VALUES["b"].sum())
    close(b * a.sum(), _VALUES["b"] * _VALUES["a"].sum())
    a.mul_(b.amax())
    close(a, _VALUES["a"] * _VALUES["b"].amax())
    with sw.trace() as steps:
        b.sub(a.amin())
    assert [c.axis for c in steps.collectives] == ["tp"]  # what was pending is finished, on the slice alone
    assert steps.bytes == 4


def _scaled(value):
    """A step of torch's scaler inside of a block on a slice; the gradient of one element may be infinite."""
    parameter, plain = _put("a"), nn.Parameter(_VALUES["a"].clone())
    mesh, scales = parameter.device_mesh, []
    for p in (parameter, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD([p], lr=0.5)
        with sw.spmd(mesh["tp"]):
            gradient = torch.full((4, 6), 8.0).index_put(
                (torch.tensor(3), torch.tensor(5)), torch.tensor(value)
            )
            p.grad = gradient if p is plain else sw.distribute_tensor(gradient, mesh, p.placements)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    close(parameter, plain.detach())
    assert scales[0] == scales[1] == (8.0 if value == 16.0 else 4.0)


@pytest.mark.parametrize("value", [16.0, float("inf")])
def test_a_scaler_steps_inside_of_a_block_on_a_slice(ranks, value):
    ranks(4, _scaled, value)


def _plain_numbers():
    """A plain number inside of a block on a slice goes to the mesh of the others, rows of a batch do not."""
    a, number = _put("a"), torch.tensor([3.0], requires_grad=True)
    mesh = a.device_mesh
    layer = nn.Linear(6, 4, bias=False)
    parallelize_tensor(layer, mesh["tp"], {"": "colwise"})
    parallelize_replicate(layer, mesh["dp"])
    with sw.spmd(mesh["tp"]):
        (a * number).sum().backward()
        for on_slice in (_put("b"), layer.weight):  # the weight computes as its local tensor over dp
            assert (on_slice * number).device_mesh == mesh["tp"]
        with pytest.raises(RuleError, match="different meshes"):
            a * torch.ones(6)
    close(number.grad, _VALUES["a"].sum()[None])
    close(a.grad, torch.full((4, 6), 3.0))


def test_plain_numbers_go_along_inside_of_a_block_on_a_slice(ranks):
    ranks(4, _plain_numbers)


def _refused():
    a, b = _put("a"), _put("b")
    with pytest.raises(RuleError, match="different meshes") as caught:
        a + b
    assert "redistribute" not in str(caught.value)  # nothing goes from a mesh to its slice
    with pytest.raises(RuleError, match=r"other\.full_tensor\(\)"):
        b * a.sum()  # its gradient would come from a slice, and another from each
    with pytest.raises(RuleError, match=r"self\.full_tensor\(\)"):
        a.sum() * b
    one, two = (nn.Parameter(_VALUES[name].clone()) for name in "ab")
    for x, y, number in ((a, b, b.sum().full_tensor()), (one, two, two.sum())):
        (x * number + y.square().sum().detach()).square().sum().backward()
    close(a.grad, one.grad)
    close(b.grad, two.grad)
    with pytest.raises(RuleError, match="different meshes"):
        a.detach().copy_(b.detach())
    largest = a.detach().amax()
    with sw.explicit(), pytest.raises(ImplicitRedistributionError, match="number"):
        b.detach().mul(largest.redistribute(placements=[sw.Partial("max"), sw.Replicate()]))


def _come_back():
    """The gradient of a number of a slice, by what it meets on the larger mesh and by what on the slice."""
    mesh = _put("a").device_mesh
    row = mesh.get_local_rank("dp")
    for cut in ([sw.Shard(0), sw.Shard(1)], [sw.Replicate(), sw.Shard(0)], [sw.Replicate()] * 2):
        for at in (sw.Shard(1), sw.Replicate()):
            a = nn.Parameter(sw.distribute_tensor(_VALUES["a"], mesh, cut))
            b = nn.Parameter(sw.distribute_tensor(_VALUES["b"], mesh["tp"], [at]))
            one, two = (nn.Parameter(_VALUES[name].clone()) for name in "ab")
            for x, y in ((a, b), (one, two)):
                number = y.square().sum()
                for loss in (number * x, x / number + number * 2, number.log() + x.sum()):
                    loss.sum().backward(retain_graph=True)
                own = (1 + row) * number.square()  # what this row alone computes
                ((x * number).sum() + own).backward()
            close(b.grad, two.grad)
            assert b.grad.device_mesh == mesh["tp"]
    scale = nn.Parameter(sw.distribute_tensor(torch.tensor([3.0]), mesh["tp"], [sw.Replicate()]))
    for _ in range(3):
        loss = (a.detach() * scale).sum()
    loss.backward()
    close(scale.grad, _VALUES["a"].sum()[None])
    assert len(scale._backward_hooks) == 1


def test_gradients_of_numbers_come_back_to_their_slice(ranks):
    ranks(4, _come_back)


def test_numbers_of_another_slice_go_along(ranks):
    ranks(4, _numbers)


def test_what_is_larger_or_wants_a_gradient_is_refused(ranks):
    ranks(4, _refused)


def _mapped():
    """A rank's coords on both meshes are what puts their parts side by side."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    there = sw.DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("back",))
    same = sw.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("flat",))
    added = sw.local_map(torch.add, out_placements=[sw.Replicate(), sw.Shard(0)])
    a, b, called = _put("a").detach(), _VALUES["b"], []
    whole = sw.distribute_tensor(b[:2], mesh["tp"], [sw.Replicate()])
    rows = sw.distribute_tensor(b, same, [sw.Shard(0)])
    close(added(a, whole), _VALUES["a"] + b[:2].repeat(2, 1))
    flat = sw.local_map(torch.mul, out_placements=[sw.Shard(0)], device_mesh=same)
    close(flat(rows, sw.distribute_tensor(b, mesh, [sw.Shard(0), sw.Shard(0)])), b * b)
    other = sw.distribute_tensor(b, there, [sw.Shard(0)])
    for arguments, index, stated in (
        ((rows, other), 1, {}),
        ((other, rows), 1, {}),
        ((1.0, other, a), 2, {}),
        ((other, rows), 0, {"device_mesh": same}),
    ):
        refused = sw.local_map(lambda *_: called.append(1), out_placements=None, **stated)
        with pytest.raises(LayoutError, match=f"argument {index} is on .*do not belong together"):
            refused(*arguments)
    assert not called


def test_local_map_refuses_parts_of_ranks_in_another_order(ranks):
    """It had put the part of one rank beside that of another, and given their sum."""
    ranks(4, _mapped)
