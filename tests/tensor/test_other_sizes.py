"""The same call on tensors of other sizes is decided from what is known, and gives one device's answer."""

import pytest
import torch

import shardwright as sw
from shardwright.rules import registry
from shardwright.tensor import other_sizes

from .cases import full, mesh, place

ROWS = (3, 8, 1, 5, 2, 4, 7)


def _adapted(function):
    """How many calls inside were decided from another size."""
    found = []
    plain = other_sizes.adapt
    other_sizes.adapt = lambda *args: found.append(plain(*args)) or found[-1]
    try:
        function()
    finally:
        other_sizes.adapt = plain
    return sum(prepared is not None for prepared in found)


def _grows():
    """Fewer rows than ranks, then more: a rank that held nothing computes its part of the next shape."""
    weight, bias = full(6, 5), full(5)

    def program(x, w, b):
        y = torch.softmax(torch.nn.functional.layer_norm(x @ w + b, (5,)), -1)
        return (y.t() * 2).sum(0), x.sum()

    def run():
        for rows in ROWS:
            x = full(rows, 6, seed=rows)
            for placements in ((sw.Shard(0),), (sw.Replicate(),), (sw.Partial(),)):
                placed = place(weight, (sw.Replicate(),)), place(bias, (sw.Shard(0),))
                got = program(place(x, placements), *placed)
                for ours, wanted in zip(got, program(x, weight, bias), strict=True):
                    torch.testing.assert_close(ours.full_tensor(), wanted, rtol=1e-5, atol=1e-5)

    return _adapted(run)


def test_shapes_that_change_from_call_to_call(ranks):
    assert all(count > 0 for count in ranks(3, _grows))


def _refuses():
    """What one device refuses is refused for a shape that is only known by its kind."""
    x, y = place(full(8, 4), (sw.Shard(0),)), place(full(8, 4), (sw.Shard(0),))
    assert (x + y).shape == (8, 4)
    with pytest.raises(RuntimeError, match="broadcast"):
        x + place(full(4, 4), (sw.Shard(0),))
    with pytest.raises(RuntimeError, match=r"size|normalized_shape"):
        torch.nn.functional.layer_norm(place(full(6, 3), (sw.Shard(0),)), (4,))


def test_sizes_that_do_not_fit_are_refused_as_on_one_device(ranks):
    ranks(2, _refuses)


def _follows():
    """A rule that comes takes effect at once, for shapes that are known by their kind too."""
    x = place(full(8, 4), (sw.Partial(),))
    assert not torch.sin(x).layout.pending_axes
    rule = sw.rule("aten::sin", "... -> ...", hom="self: sum->sum")  # wrong, but a rule
    try:
        assert torch.sin(place(full(6, 4), (sw.Partial(),))).layout.pending_axes
    finally:
        registry.registry.remove(rule)
    assert not torch.sin(place(full(7, 4), (sw.Partial(),))).layout.pending_axes
    assert mesh().ndim == 1


def test_a_rule_takes_effect_at_once(ranks):
    ranks(2, _follows)
