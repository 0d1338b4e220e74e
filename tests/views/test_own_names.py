"""A placement of the user names what a view of a tensor that it cuts holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import shardwright as sw
from shardwright.errors import PlacementError
from shardwright.index.region import Box, Region
from shardwright.placement import Partition
from shardwright.testing import check_placement
from tests.tensor.cases import full, mesh


@dataclass(frozen=True)
class Turns(Partition):
    """Rows are dealt out there and back again, the first one as the number `first` of a round."""

    first: int

    def region(self, shape, n, coord):
        rows = [row for row in range(shape[0]) if (row + self.first) % (2 * n) in (coord, 2 * n - 1 - coord)]
        boxes = [Box((row, *[0] * (len(shape) - 1)), (1, *shape[1:])) for row in rows]
        return Region(boxes, (len(rows), *shape[1:]))

    def validate(self, shape, n):
        if not shape:
            raise PlacementError("Turns needs rows")

    @classmethod
    def names(cls, held, length, n):
        return (cls(first) for first in range(2 * n))


class Nameless(Turns):
    """The same without names of its own."""

    names = classmethod(Partition.names.__func__)


def _named(kind, wanted):
    x = full(13, 3)
    d = sw.distribute_tensor(x, mesh(), [kind(0)])
    for view in (lambda t: t[3:], lambda t: t[1:][2:], lambda t: t.view(13, 3)[3:11]):
        got = view(d)
        assert got.placements == wanted, got.placements
        assert torch.equal(got.full_tensor(), view(x))
    other = sw.distribute_tensor(x[3:].contiguous(), mesh(), wanted)
    with sw.trace() as trace:
        total = d[3:] + other
    assert not trace.collectives
    assert total.placements == wanted


def test_a_class_names_the_views_of_what_it_cuts(ranks):
    ranks(3, _named, Turns, (Turns(3),))


def test_without_names_they_are_derived(ranks):
    with pytest.raises(Exception, match="Sliced"):
        ranks(3, _named, Nameless, (Nameless(3),))


def test_names_are_laws_too():
    check_placement(Turns(1))
