"""Operands of a mesh and of its slices in one call: a number goes along, anything larger keeps its mesh."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError, RuleError
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


def _refused():
    a, b = _put("a"), _put("b")
    with pytest.raises(RuleError, match="different meshes"):
        a + b
    with pytest.raises(RuleError, match="different meshes"):
        a * b.sum()  # its gradient would have to come back
    with pytest.raises(RuleError, match="different meshes"):
        a.detach().copy_(b.detach())
    largest = a.detach().amax()
    with sw.explicit(), pytest.raises(ImplicitRedistributionError, match="number"):
        b.detach().mul(largest.redistribute(placements=[sw.Partial("max"), sw.Replicate()]))


def test_numbers_of_another_slice_go_along(ranks):
    ranks(4, _numbers)


def test_what_is_larger_or_wants_a_gradient_is_refused(ranks):
    ranks(4, _refused)
