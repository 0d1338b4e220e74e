"""A placement of the user names what a view of a tensor that it cuts holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import shardwright as sw
from shardwright.errors import PlacementError
from shardwright.index.region import Box, Region
from shardwright.placement import Partition
from shardwright.testing import check_placement, rank_mesh
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


class Raises(Turns):
    @classmethod
    def names(cls, held, length, n):
        raise ZeroDivisionError("mine")


class OffersNumbers(Turns):
    @classmethod
    def names(cls, held, length, n):
        return [42]


@dataclass(frozen=True)
class Prefixed(sw.Shard):
    """A subclass with another constructor, and the names of its parent."""

    def __init__(self, note, dim):
        super().__init__(dim)
        object.__setattr__(self, "note", note)


def _not_named():
    x = full(13, 3)
    for placement in (Raises(0), OffersNumbers(0), Prefixed("a", 0)):
        with sw.trace() as trace:
            got = sw.distribute_tensor(x, mesh(), [placement], src_data_rank=None)[2:]
            assert isinstance(got.placements[0], sw.placement.Sliced | sw.placement.Ragged)
            sw.layout_of(got).region((0,))
        assert not trace.collectives
        assert torch.equal(got.full_tensor(), x[2:])


def test_names_that_are_none_leave_the_derived_one(ranks):
    ranks(2, _not_named)


@dataclass(frozen=True)
class AntiDiagonal(Partition):
    """Element (r, c) of a matrix lives on coord (r + c) % n, flat."""

    def validate(self, shape, n):
        if len(shape) != 2:
            raise PlacementError("AntiDiagonal is for matrices")

    def region(self, shape, n, coord):
        cells = [(r, c) for r in range(shape[0]) for c in range(shape[1]) if (r + c) % n == coord]
        return Region([Box(at, (1, 1)) for at in cells], (1, len(cells)))


VIEWS = (lambda t: t.t(), lambda t: torch.stack([t, t]), lambda t: t[:, 1:], lambda t: t.permute(1, 0))


def _of_one_row():
    """What an earlier axis leaves is one row, which is cut along its dim; the tensor itself is not."""
    here = rank_mesh((2, 1), ("dp", "tp"))
    for first, rows in ((sw.Shard(0), 2), (Turns(1), 2), (sw.Shard(0), 4), (sw.Replicate(), 1)):
        x = full(rows, 7)
        d = sw.distribute_tensor(x, here, [first, AntiDiagonal()])
        for view in (
            lambda t: t.t(),
            lambda t: torch.stack([t, t]),
            lambda t: t[:, 1:],
            lambda t: t.permute(1, 0),
        ):
            with sw.trace() as t:
                got = view(d)
            assert torch.equal(got.full_tensor(), view(x))
            assert not t.bytes


def test_a_form_that_holds_for_what_is_left_alone_is_passed_over(ranks):
    ranks(2, _of_one_row)
