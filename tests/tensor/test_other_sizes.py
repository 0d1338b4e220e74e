"""The same call on tensors of other sizes is decided from what is known, and gives one device's answer."""

from itertools import product

import pytest
import torch

import shardwright as sw
from shardwright.rules import registry
from shardwright.tensor.dispatch import other_sizes
from shardwright.tensor.dispatch.ways import local_reshape
from shardwright.testing import forget
from tests.tiers import only

from .cases import full, mesh, place

ROWS = (3, 8, 1, 5, 2, 4, 7)


def _adapted(function, module=other_sizes):
    """How many calls inside were decided from another size."""
    found = []
    plain = module.adapt
    module.adapt = lambda *args: found.append(plain(*args)) or found[-1]
    try:
        function()
    finally:
        module.adapt = plain
    return sum(prepared is not None for prepared in found)


def _grows():
    """Fewer rows than ranks, then more: a rank that held nothing computes its part of the next shape."""
    weight, bias = full(6, 5), full(5)

    def program(x, w, b):
        y = torch.softmax(torch.nn.functional.layer_norm(x @ w + b, (5,)), -1)
        return (y.t() * 2).sum(0), x.sum(), x.amax(0)

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
    with pytest.raises(RuntimeError, match=r"size of tensor a \(8\) must match"):
        x + place(full(4, 4), (sw.Shard(0),))
    with pytest.raises(RuntimeError, match=r"size|normalized_shape"):
        torch.nn.functional.layer_norm(place(full(6, 3), (sw.Shard(0),)), (4,))


def test_sizes_that_do_not_fit_are_refused_as_on_one_device(ranks):
    ranks(2, _refuses)


def _follows():
    """A rule that comes takes effect at once, for shapes that are known by their kind too."""
    x = place(full(8, 4), (sw.Partial(),))
    assert not sw.layout_of(torch.sin(x)).pending_axes
    rule = sw.rule("aten::sin", "... -> ...", hom="self: sum->sum")  # wrong, but a rule
    try:
        assert sw.layout_of(torch.sin(place(full(6, 4), (sw.Partial(),)))).pending_axes
    finally:
        registry.registry.remove(rule)
    assert not sw.layout_of(torch.sin(place(full(7, 4), (sw.Partial(),)))).pending_axes
    assert mesh().ndim == 1


def test_a_rule_takes_effect_at_once(ranks):
    ranks(2, _follows)


# A pattern of sizes, first for one shape, then for others: some fit what was learned, some do not.
RESHAPES = (
    "8,6>8,2,3 12,10>12,2,5 5,4>5,2,2 1,6>1,2,3 4,8>4,1,8",
    "8,6>4,2,6 12,5>4,3,5 6,4>2,3,4 9,2>3,3,2 8,6>1,8,6",
    "4,2,6>8,6 8,3,2>24,2 3,5,2>15,2 4,0,2>0,2 2,2,2>4,2",
    "4,6>-1 8,3>-1 7,5>-1 1,1>-1 2,0>0",
    "1,1>1,1,1 2,1>2,1,1 1,1>1,1,1 3,1>1,3,1 4,1>1,2,2",
    "4,1,6>4,6 8,1,3>8,3 8,2,3>8,6 5,1,2>5,2 6,4,1>6,4",
    "4,6,8>4,6,2,-1 8,2,4>8,2,2,2 3,4,6>3,4,2,-1 4,6,4>2,12,2,2",
)
CUTS = (
    sw.Shard(0),
    sw.Shard(-1),
    sw.Interleaved(0, 2),
    sw.Ragged((1, 3), (0,)),
    sw.Partial(),
    sw.Replicate(),
)


def _calls(pattern):
    """The shape and the size of each reshape."""
    pairs = [call.split(">") for call in pattern.split()]
    return [[tuple(map(int, sizes.split(","))) for sizes in pair] for pair in pairs]


def _reshapes(part):
    """Values and layouts as when every shape is decided on its own, and nothing moves."""

    def run():
        for pattern, pair in product(RESHAPES[part::3], list(product(CUTS, CUTS))[::3]):
            forget()
            taken = [(given, _viewed(*given, pair)) for given in _calls(pattern)]
            for given, layout in taken:
                forget()
                alone = _viewed(*given, pair)
                assert (layout, _kind(layout)) == (alone, _kind(alone)), given

    return _adapted(run, local_reshape)


def _kind(layout):
    """What a kind says: one object per kind, but not the same one after `forget`."""
    return layout.kind and [getattr(layout.kind, name) for name in layout.kind.__slots__]


def _viewed(shape, size, placements):
    """The layout of the view; this rank's part is that of the view of the whole tensor."""
    grid, x = mesh(), full(*shape)
    coords = tuple(grid.get_coordinate())
    layout = sw.Layout(grid, placements, shape, dtype=x.dtype)
    local = _terms(layout).split(x, coords).clone()
    with sw.trace() as trace:
        y = sw.DTensor.from_local(local, grid, placements, shape=shape, stride=x.stride()).view(size)
    assert not trace.collectives
    assert torch.equal(y.to_local(), _terms(sw.layout_of(y)).split(x.view(size), coords)), (
        shape,
        size,
        sw.layout_of(y),
    )
    return sw.layout_of(y)


def _terms(layout):
    """Every rank's term of a sum is the value itself here."""
    placements = [sw.Replicate() if p.is_pending else p for p in layout.placements]
    return layout.with_placements(placements, order=layout.order_names)


ADAPTED = (20, 6, 14)  # more reshapes of each part are decided by what is known of others


@pytest.mark.parametrize("part", only([0], range(3)))
def test_reshapes_of_other_sizes_are_decided_as_if_they_were_the_first(ranks, part):
    counts = ranks(4, _reshapes, part)
    assert min(counts) > ADAPTED[part], counts
