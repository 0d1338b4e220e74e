"""A class that contradicts itself, or breaks a law, is refused where it is first met, on every rank alike."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import dataclass

import pytest
import torch

from shardwright.errors import PlacementError
from shardwright.index.cover import no_partition
from shardwright.index.runs import Run, interval
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import (
    AlongDim,
    Box,
    Owner,
    Partial,
    Partition,
    Pending,
    Ragged,
    Region,
    Replicate,
    Shard,
    ZigZag,
)
from shardwright.testing import rank_mesh
from tests.placement.user_placements import Backwards, Band, Checkerboard, LogSumExp, RowsInTurn

PAIR = MeshShape(("tp",), (2,))
SHAPE = (7, 2)
LARGE = (1201, 5, 3)


def laid(placement, shape=SHAPE, dtype=torch.float32):
    return Layout(PAIR, [placement], shape, dtype=dtype)


def rows(shape, which):
    boxes = [Box((row, *[0] * (len(shape) - 1)), (1, *shape[1:])) for row in which]
    return Region(boxes, (len(boxes), *shape[1:]))


# ------------------------------------------------------------------------------------- regions


class LosesLast(Partition):
    def region(self, shape, n, coord):
        piece = shape[0] // n
        return rows(shape, range(coord * piece, coord * piece + piece))


class AllOnAll(Partition):
    def region(self, shape, n, coord):
        return rows(shape, range(shape[0]))


class OneForAnother(Partition):
    """As many elements as the tensor has, one of them twice."""

    def region(self, shape, n, coord):
        return rows(shape, [max(row, 1) for row in range(coord, shape[0], n)])


class Beyond(Partition):
    def region(self, shape, n, coord):
        piece = -(-shape[0] // n)
        return rows(shape, range(coord * piece, coord * piece + piece))


class Before(Partition):
    def region(self, shape, n, coord):
        return rows(shape, [-1 - row for row in range(coord, shape[0], n)])


class WrongLocal(Partition):
    def region(self, shape, n, coord):
        held = rows(shape, range(coord, shape[0], n))
        return Region(held.boxes, (len(held.boxes) + 1, *shape[1:]))


class FlatLocal(Partition):
    def region(self, shape, n, coord):
        held = rows(shape, range(coord, shape[0], n))
        return Region(held.boxes, (held.numel,))


class FlatBoxes(Partition):
    def region(self, shape, n, coord):
        held = range(coord, shape[0], n)
        return Region([Box((row,), (1,)) for row in held], (len(held), *shape[1:]))


class Halves(Partition):
    def region(self, shape, n, coord):
        half = shape[0] / n
        return Region([Box((half * coord, 0), (half, shape[1]))], (half, shape[1]))


class OfTensors(Partition):
    """Rows found with torch, and never made numbers."""

    def region(self, shape, n, coord):
        return rows(shape, torch.arange(coord, shape[0], n))


class Nothing(Partition):
    def region(self, shape, n, coord):
        return None


class Pairs(Partition):
    def region(self, shape, n, coord):
        return [((0, 0), shape)], shape


class OnOneCoord(Partition):
    def region(self, shape, n, coord):
        return rows(shape, {0: range(shape[0])}[coord])


@dataclass(frozen=True)
class LosesRuns(AlongDim):
    """A cut of one dim; without a word about sizes, so that what is known of one size is used for all."""

    dim: int

    def runs(self, length, n, coord):
        piece = length // n
        return interval(coord * piece, coord * piece + piece)


@dataclass(frozen=True)
class CrossedRuns(AlongDim):
    dim: int

    def runs(self, length, n, coord):
        return (Run(coord, 1, 3, length // n),)


NO_PARTITIONS = [
    (LosesLast(), r"element \(6, 0\) is held by no coord"),
    (AllOnAll(), r"element \(0, 0\) is held more than once"),
    (OneForAnother(), r"element \(0, 0\) is held by no coord"),
    (Beyond(), r"coord 1: its box at \(7, 0\) of size \(1, 2\) leaves the tensor"),
    (Before(), r"coord 0: its box at \(-1, 0\) of size \(1, 2\) leaves the tensor"),
    (WrongLocal(), r"coord 0: its boxes hold 8 elements, its local shape is \(5, 2\)"),
    (FlatLocal(), r"its local shape \(8,\) has not 2 dims"),
    (FlatBoxes(), r"its box at \(0,\) of size \(1,\) has not 2 dims"),
    (Halves(), r"its local shape \(3.5, 2\) is not made of integers"),
    (OfTensors(), r"its box at \(tensor\(0\), 0\) of size \(1, 2\) is not made of integers"),
    (Nothing(), r"region\(\) gave None, not a Region"),
    (Pairs(), r"not a Region"),
    (OnOneCoord(), r"region\(\(7, 2\), 2, 1\) raised KeyError"),
    (LosesRuns(0), r"element \(6, 0\) is held by no coord"),
    (CrossedRuns(0), r"leaves the tensor|held"),
]


@pytest.mark.parametrize(("placement", "message"), NO_PARTITIONS, ids=lambda value: str(value)[:40])
def test_regions_that_are_no_partition_are_refused(placement, message):
    with pytest.raises(PlacementError, match=rf"{type(placement).__name__}.*{message}"):
        laid(placement)


def test_the_shapes_that_earlier_axes_leave_are_looked_at():
    mesh = MeshShape(("dp", "tp"), (2, 2))
    whole = Layout(mesh, [Replicate(), LosesLast()], (8, 6), dtype=torch.float32)
    assert whole.local_shape((0, 0)) == (4, 6)
    with pytest.raises(PlacementError, match=r"LosesLast.*shape \(3, 6\)"):
        Layout(mesh, [Shard(0), LosesLast()], (6, 6), dtype=torch.float32)


def test_a_size_that_is_known_from_another_is_looked_at_too():
    known = laid(LosesRuns(0), (8, 2))
    with pytest.raises(PlacementError, match=r"LosesRuns.*\(9, 2\)"):
        Layout.of_kind(known.kind, (9, 2))


def test_what_is_made_of_a_class_is_looked_at():
    from shardwright.placement import Flat, Nested, Sliced

    for placement in (
        Flat((0, 1), LosesLast()),
        Nested(((LosesLast(), 2),)),
        Sliced(0, LosesLast(), 6, 0, 1, 5),  # of 6, it is right; a dim of 7 is cut as the source cuts it
    ):
        with pytest.raises(PlacementError, match=r"LosesLast.*is no partition"):
            laid(placement, (7,) if isinstance(placement, Sliced) else (7, 3))


def test_regions_of_a_class_are_asked_for_once():
    asked = []

    class Counted(RowsInTurn):
        def region(self, shape, n, coord):
            asked.append((shape, n, coord))
            return super().region(shape, n, coord)

    placement = Counted()
    laid(placement)
    before = len(asked)
    for _ in range(3):
        laid(placement)
    assert before == len(asked)


def test_many_boxes_are_compared_without_their_elements():
    """Boxes that lie across each other: the grid of their edges would have millions of cells."""
    size = 1 << 14
    boxes = [Box((i * size, j * size + i), (size, size)) for i in range(40) for j in range(40)]
    edges = [Box((i * size, 0), (size, i)) for i in range(40)]
    ends = [Box((i * size, 40 * size + i), (size, 40 - i)) for i in range(40)]
    shape = (40 * size, 40 * size + 40)
    all_of_it = [*boxes, *edges, *ends]
    local = (1, sum(box.numel for box in all_of_it))
    tracemalloc.start()
    assert no_partition([Region(all_of_it, local)], shape) is None
    moved = [Box((0, 1), (size, size)), *all_of_it[1:]]
    assert "twice" in no_partition([Region(moved, local)], shape)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()


# ----------------------------------------------------------------------- other methods of a partition


class ReversedShard(Shard):
    def region(self, shape, n, coord):
        return super().region(shape, n, n - 1 - coord)


class ReversedZig(ZigZag):
    def region(self, shape, n, coord):
        return super().region(shape, n, n - 1 - coord)


class OtherOwner(Owner):
    def region(self, shape, n, coord):
        return super().region(shape, n, n - 1 - coord)


class OtherRows(Ragged):
    def region(self, shape, n, coord):
        return RowsInTurn().region(shape, n, coord)


class BadSplit(RowsInTurn):
    def split(self, x, n, coord):
        return x[n - 1 - coord :: n]


class BadJoin(RowsInTurn):
    def join(self, locals, shape):  # noqa: A002
        return torch.cat(locals)


class BadLocalShape(RowsInTurn):
    def local_shape(self, shape, n, coord):
        return shape


class BadEven(RowsInTurn):
    def even(self, shape, n):
        return True


class BadCutDims(RowsInTurn):
    def cut_dims(self, shape, n):
        return (1,)


class BadTouched(RowsInTurn):
    def touched_dims(self, shape, n):
        return (1,)


class BadUndivided(RowsInTurn):
    undivided = True


class BadFlatGroup(RowsInTurn):
    def flat_group(self):
        return (0, 1)


class BadWithin(RowsInTurn):
    def within(self, region, n, coord):
        return super().within(region, n, n - 1 - coord)


class BadOnDims(Backwards):
    def on_dims(self, dims):
        return Shard(dims.get(self.dim, self.dim))


class BadDual(RowsInTurn):
    def dual(self):
        return Replicate()


class BadResolved(RowsInTurn):
    def resolved(self, ndim):
        return Shard(0)


CONTRADICTIONS = [
    (ReversedShard(0), "ReversedShard overrides region, and inherits .*even from Shard.*: override it too"),
    (ReversedZig(0), "ReversedZig overrides region, and inherits"),
    (OtherOwner(0), "OtherOwner overrides region, and inherits local_shape from Owner"),
    (OtherRows((1, 2)), "OtherRows overrides region, and inherits on_dims from Ragged"),
    (BadSplit(), r"split\(\) of coord 0 .*leave split and join out"),
    (BadJoin(), r"join\(split\(x\)\)"),
    (BadLocalShape(), r"local_shape\(\) of coord 0"),
    (BadEven(), r"even\(\)"),
    (BadCutDims(), r"cut_dims\(\)"),
    (BadTouched(), r"touched_dims\(\)"),
    (BadUndivided(), "it says undivided"),
    (BadFlatGroup(), r"flat_group\(\)"),
    (BadWithin(), r"within\("),
    (BadOnDims(0), r"on_dims\("),
    (BadDual(), r"dual\(\)"),
    (BadResolved(), r"resolved\(\)"),
]


@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("placement", "message"), CONTRADICTIONS, ids=lambda v: type(v).__name__)
def test_a_method_that_contradicts_the_region_is_refused(placement, message, shape):
    with pytest.raises(PlacementError, match=rf"(?s){type(placement).__name__}.*contradicts.*{message}"):
        laid(placement, shape)


@dataclass(frozen=True)
class OwnNames(Shard):
    """A subclass that says no other meaning is what its parent is."""

    note: str = ""

    def __init__(self, dim, note):
        super().__init__(dim)
        object.__setattr__(self, "note", note)


class FullShard(Shard):
    """Another meaning, and every method that goes with it."""

    def __init__(self, dim, turn):
        super().__init__(dim)
        object.__setattr__(self, "turn", turn)

    def runs(self, length, n, coord):
        return super().runs(length, n, (coord + self.turn) % n)

    def local_length(self, length, n, coord):
        return super().local_length(length, n, (coord + self.turn) % n)

    def split(self, x, n, coord):
        return super().split(x, n, (coord + self.turn) % n)

    def join(self, locals, shape):  # noqa: A002
        n = len(locals)
        return super().join([locals[(coord - self.turn) % n] for coord in range(n)], shape)


@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "placement",
    [OwnNames(0, "mine"), FullShard(0, 1), RowsInTurn(), Backwards(1)],
    ids=lambda p: type(p).__name__,
)
def test_a_class_that_agrees_with_itself_is_taken(placement, shape):
    found = laid(placement, shape)
    x = torch.arange(found.numel).view(shape)
    assert torch.equal(found.join([found.split(x, (coord,)) for coord in range(2)]), x)


class NotedPartial(Partial):
    def __init__(self, reduce_op, note):
        super().__init__(reduce_op)
        object.__setattr__(self, "note", note)


def test_a_subclass_is_compared_and_moved_with_what_it_adds():
    """`Shard` knows of its dim only: two that differ in more were one key of every table."""
    one, two = FullShard(0, 0), FullShard(0, 1)
    assert one != two
    assert two == FullShard(0, 1) == pickle.loads(pickle.dumps(two))
    for made in (two, NotedPartial("max", "mine")):
        text, names = made.__fx_repr__()  # in code that torch generates
        again = eval(text, dict(names))  # noqa: S307 - as that code is
        assert again == made == pickle.loads(pickle.dumps(made))
    assert NotedPartial("max", "mine") != NotedPartial("max", "other")
    assert two.on_dim(1) == FullShard(1, 1) == FullShard(-1, 1).resolved(2)
    assert laid(one, (8, 2)).region((0,)) != laid(two, (8, 2)).region((0,))


# ------------------------------------------------------------------------------------- pendings


@dataclass(frozen=True)
class Sum(Pending):
    """Right. The faults below change one thing."""

    def combine(self, locals):  # noqa: A002
        return torch.stack(tuple(locals)).sum(0).to(locals[0].dtype)

    def embed(self, x, n, coord):
        return x.clone() if coord == 0 else torch.zeros_like(x)


class EmbedsAll(Sum):
    def embed(self, x, n, coord):
        return x.clone()


class EmbedsItself(Sum):
    def embed(self, x, n, coord):
        return x if coord == 0 else torch.zeros_like(x)


class EmbedsFlat(Sum):
    def embed(self, x, n, coord):
        return super().embed(x, n, coord).flatten()


class CombinesToNone(Sum):
    def combine(self, locals):  # noqa: A002
        return None


class CombinesToLess(Sum):
    def combine(self, locals):  # noqa: A002
        return super().combine(locals)[:1]


class CombinesWider(Sum):
    def combine(self, locals):  # noqa: A002
        return super().combine(locals).double()


class CombinesTheThird(Sum):
    def combine(self, locals):  # noqa: A002
        return locals[2]


class Flips(Sum):
    def combine(self, locals):  # noqa: A002
        return super().combine(locals).flip(1)

    def embed(self, x, n, coord):
        return super().embed(x.flip(1), n, coord)


class SaysMax(Sum):
    reduce_op = "max"


class SaysLinear(LogSumExp):
    linear = True


class IgnoresOnes(Sum):
    def identity(self, x):
        return torch.ones_like(x)


class OtherInPlace(Sum):
    def combine_in_place(self, locals, free):  # noqa: A002
        return self.combine(locals) * 2


class DualIsNumber(Sum):
    def dual(self):
        return 42


class Doubled(Partial):
    """A lawful pair, and another reduction than its name says."""

    def combine(self, locals):  # noqa: A002
        return super().combine(locals) * 2

    def embed(self, x, n, coord):
        return super().embed(x, n, coord) / 2


BROKEN_PENDINGS = [
    (EmbedsAll(), r"combine\(embed\(x\)\) is"),
    (EmbedsItself(), r"embed\(\) of coord 0 is the value itself"),
    (EmbedsFlat(), r"embed\(\) of coord 0 made torch.float32 of shape \(6,\)"),
    (CombinesToNone(), r"combine\(\) made None, not a tensor"),
    (CombinesToLess(), r"combine\(\) made torch.float32 of shape \(1, 3\)"),
    (CombinesWider(), r"combine\(\) made torch.float64"),
    (CombinesTheThird(), "raised IndexError"),
    (Flips(), r"combine\(\) of some elements"),
    (SaysMax(), "its reduce_op names 'max'"),
    (SaysLinear(2), "it says linear"),
    (IgnoresOnes(), r"identity\(\) is"),
    (OtherInPlace(), r"combine_in_place\(\) is"),
    (DualIsNumber(), r"dual\(\) is 42"),
    (Doubled("sum"), "derive from sw.Pending"),
]


@pytest.mark.parametrize(("placement", "message"), BROKEN_PENDINGS, ids=lambda v: type(v).__name__)
def test_a_pending_that_contradicts_itself_is_refused(placement, message):
    with pytest.raises(PlacementError, match=rf"(?s){type(placement).__name__}.* over 2 coords.*{message}"):
        laid(placement)


class OnlyElsewhere(Sum):
    """Its kernel is not for this device."""

    def combine(self, locals):  # noqa: A002
        raise RuntimeError("no kernel for the CPU")


class Rounds(Sum):
    """Right up to rounding, and does not say so."""

    def embed(self, x, n, coord):
        return x / 3

    def combine(self, locals):  # noqa: A002
        return super().combine(locals) / len(locals) * 3


def test_what_cannot_be_judged_or_only_rounds_is_taken():
    for placement in (OnlyElsewhere(), Rounds(), Sum(), LogSumExp(2), OwnPartial("avg")):
        laid(placement)
    laid(LogSumExp(2), dtype=torch.int64)  # outside of its domain


class OwnPartial(Partial):
    """Says nothing else."""


# ------------------------------------------------------------------------------------- on ranks

ON_RANKS = [LosesLast(), AllOnAll(), Beyond(), BadSplit(), CombinesToNone()]


def _refused_alike():
    import shardwright as sw

    mesh = rank_mesh((2,), ("tp",))
    full = torch.arange(14.0).view(SHAPE)
    ways = (
        lambda placement: sw.distribute_tensor(full, mesh, [placement]),
        lambda placement: sw.distribute_tensor(full, mesh, [sw.Shard(1)]).redistribute({"tp": placement}),
        lambda placement: sw.DTensor.from_local(full, mesh, [placement], shape=SHAPE, stride=(2, 1)),
        lambda placement: sw.zeros(SHAPE, device_mesh=mesh, placements=[placement]),
    )
    said = []
    for placement in ON_RANKS:
        for way in ways:
            with pytest.raises(PlacementError, match=type(placement).__name__) as caught:
                way(placement)
            said.append(str(caught.value))
    taken = sw.distribute_tensor(full, mesh, [FullShard(0, 1)])
    for placement in (Checkerboard(2), Band(), sw.Shard(0)):
        assert torch.equal(taken.redistribute({"tp": placement}).full_tensor(), full)
    assert torch.equal((taken * taken).t().full_tensor(), (full * full).t())
    return said


def test_every_rank_refuses_alike_before_anything_moves(ranks):
    first, second = ranks(2, _refused_alike)
    assert first == second
