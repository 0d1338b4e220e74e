"""Wrong placements, each with one fault, are all caught with a counterexample that a person can read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shardwright.errors import PlacementError
from shardwright.index.runs import Run, interval
from shardwright.placement import (
    AlongDim,
    Box,
    Owner,
    Partial,
    Partition,
    Pending,
    Placement,
    Ragged,
    Region,
    Shard,
    ZigZag,
)
from shardwright.testing.check_placement import BrokenLawError, PlacementLaws, check_placement
from shardwright.testing.hook_laws import HOOKS
from tests.placement.user_placements import SkewedOrNot


@dataclass(frozen=True)
class Rows(Partition):
    """Right: consecutive rows. The faults below change one thing."""

    def bounds(self, rows, n, coord):
        piece = -(-rows // n)
        return min(coord * piece, rows), min((coord + 1) * piece, rows)

    def local(self, shape, count):
        return (count, *shape[1:])

    def region(self, shape, n, coord):
        low, high = self.bounds(shape[0], n, coord)
        box = Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
        return Region((box,), self.local(shape, high - low))

    def validate(self, shape, n):
        if not shape:
            raise PlacementError("Rows needs a dim")


class Overlap(Rows):
    def bounds(self, rows, n, coord):
        low, high = super().bounds(rows, n, coord)
        return low, min(high + 1, rows)


class Hole(Rows):
    def bounds(self, rows, n, coord):
        return coord * (rows // n), (coord + 1) * (rows // n)


class OutOfBounds(Rows):
    def bounds(self, rows, n, coord):
        piece = -(-rows // n)
        return coord * piece, (coord + 1) * piece


class WrongLocalShape(Rows):
    def local(self, shape, count):
        return (count + 1, *shape[1:])


class FlatLocalShape(Rows):
    def local(self, shape, count):
        size = 1
        for length in (count, *shape[1:]):
            size *= length
        return (size,)


class AnotherLocalShape(Rows):
    def local_shape(self, shape, n, coord):
        return (-(-shape[0] // n), *shape[1:])


class ReversedSplit(Rows):
    def split(self, x, n, coord):
        return super().split(x, n, coord).flip(0)


class JoinedInAnotherOrder(Rows):
    def join(self, terms, shape):
        return torch.cat(list(reversed(terms)))


class JoinForgetsTheTail(Rows):
    def join(self, terms, shape):
        kept = max(part.shape[0] for part in terms)
        return torch.cat([part for part in terms if part.shape[0] == kept])


class CutsNothing(Rows):
    def cut_dims(self, shape, n):
        return ()


class TouchesNothing(Rows):
    def touched_dims(self, shape, n):
        return ()


class AlwaysEven(Rows):
    def even(self, shape, n):
        return True


class SecondCoordTwice(Rows):
    def bounds(self, rows, n, coord):
        return super().bounds(rows, n, min(coord, 1))


class FailsOnEmpty(Rows):
    def bounds(self, rows, n, coord):
        return super().bounds(rows, n, coord) if 1 // rows >= 0 else (0, 0)


class NotARegion(Rows):
    def region(self, shape, n, coord):
        return super().region(shape, n, coord).boxes


class WrongRank(Rows):
    def region(self, shape, n, coord):
        low, high = self.bounds(shape[0], n, coord)
        return Region((Box((low,), (high - low,)),), (high - low,))


@dataclass(frozen=True)
class WrongOnDim(AlongDim):
    dim: int

    def runs(self, length, n, coord):
        piece = -(-length // n)
        return interval(min(coord * piece, length), min((coord + 1) * piece, length))

    def moved(self, dim):
        return Shard(dim) if dim == self.dim else Backwards(dim)


@dataclass(frozen=True)
class Backwards(AlongDim):
    dim: int

    def runs(self, length, n, coord):
        return WrongOnDim(0).runs(length, n, n - 1 - coord)


@dataclass(frozen=True)
class LostTail(AlongDim):
    """Blocks dealt out, without the rest of the last round."""

    dim: int

    def runs(self, length, n, coord):
        return (Run(coord, 1, n, length // n),) if length >= n else ()


@dataclass
class NotFrozen(Partition):
    seed: int


class ForgetsItself(Rows):
    def __init__(self, seed):
        object.__setattr__(self, "seed", [seed])

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)

    def __deepcopy__(self, memo):
        return ForgetsItself(self.seed)


class HalfOnEachCoord(Pending):
    """Right for two coords only."""

    def combine(self, terms):
        return sum(terms[1:], terms[0].clone())

    def embed(self, x, n, coord):
        return x / 2

    def in_domain(self, x):
        return x.is_floating_point()


class SumsFully(Partial):
    def combine(self, terms):
        return super().combine(terms) + sum(part.sum() for part in terms) - sum(p.sum() for p in terms[:1])


class ForgetsTheLast(Partial):
    def combine(self, terms):
        return super().combine(terms[:-1] or terms)

    def embed(self, x, n, coord):
        return super().embed(x, n, n - 1 - coord)


class ChangesItsTerms(Partial):
    def combine(self, terms):
        return terms[0].add_(sum(terms[1:], torch.zeros_like(terms[0])))

    def embed(self, x, n, coord):
        return x if coord == 0 else x.neg_().neg_().mul(0).add(1)


class WiderResult(Partial):
    def combine(self, terms):
        return super().combine(terms).double()


class WrongIdentity(Partial):
    def identity(self, x):
        return torch.ones_like(x)


class SaysLinear(Pending):
    linear = True

    def combine(self, terms):
        return torch.stack(list(terms)).amax(0)

    def embed(self, x, n, coord):
        return x.clone()

    def in_domain(self, x):
        return not x.is_complex()


class NotElementwise(Pending):
    """Coord 0 holds the value; the mean of the others is added, and is zero only for whole tensors."""

    def combine(self, terms):
        first = terms[0]
        return first.clone() if first.numel() % 2 == 0 else first + first.numel() // 2

    def embed(self, x, n, coord):
        return x.clone()

    def in_domain(self, x):
        return x.dtype == torch.float32


class ElsewhereAnotherCut(Rows):
    def on_dim(self, dim):
        return Shard(dim) if dim == 0 else Owner(0)


class TheOtherWay(Rows):
    """`on_dim` of its own dim is another cut."""

    def on_dim(self, dim):
        return ZigZag(dim)


class RenumbersWrongly(Rows):
    def on_dims(self, dims):
        return Shard(max(dims.values(), default=0))


class NamedLikeAnother(Rows):
    @classmethod
    def names(cls, held, length, n):
        return (Owner(0),)


class FlattensInName(Rows):
    def flat_group(self):
        return (0, 1)


class HeldByNobody(Rows):
    undivided = True


class WithinForgetsTheOffset(Rows):
    def within(self, region, n, coord):
        return self.region(region.local_shape, n, coord)


class TouchesAnotherDim(Rows):
    """Says that it touches no dim but the last, where its rows are never cut first."""

    def region(self, shape, n, coord):
        return (
            Shard(len(shape) - 1).region(shape, n, coord)
            if shape[0] % 2
            else Owner(0).region(shape, n, coord)
        )

    def touched_dims(self, shape, n):
        return (0,) if shape[0] % 2 == 0 and len(shape) < 2 else tuple({0, len(shape) - 1} - {0} or {0})


class ResolvesToAnother(Rows):
    def resolved(self, ndim):
        return ZigZag(0)


class ValidatesWithAnAssertion(Rows):
    def validate(self, shape, n):
        super().validate(shape, n)
        if shape[0] == 7:
            raise ValueError("seven")


class DetachedSplit(Rows):
    def split(self, x, n, coord):
        return super().split(x.detach(), n, coord)


class DetachedJoin(Rows):
    def join(self, terms, shape):
        return super().join([part.detach() for part in terms], shape)


class AnySizeInName(Rows):
    any_size = True

    def region(self, shape, n, coord):
        dim = len(shape) - 1 if shape[0] > 2 else 0
        return Shard(dim).region(shape, n, coord)


class AnotherDual(Rows):
    def dual(self):
        return ZigZag(0)


@dataclass(frozen=True)
class MiscountsItsRuns(AlongDim):
    dim: int

    def runs(self, length, n, coord):
        return Shard(0).runs(length, n, coord)

    def local_length(self, length, n, coord):
        return super().local_length(length, n, coord) if length < 5 else length // n

    def local_shape(self, shape, n, coord):
        return self.region(shape, n, coord).local_shape


class CombinesElsewhereInPlace(Partial):
    def combine_in_place(self, locals, free):  # noqa: A002
        return super().combine(locals) + 1


class OverwritesWhatIsNotFree(Partial):
    def combine_in_place(self, locals, free):  # noqa: A002
        total = super().combine(locals)
        locals[0].zero_()
        return total


class EmbedsTheValueItself(Partial):
    def embed(self, x, n, coord):
        return x if coord == 0 else super().embed(x, n, coord)


class DualIsACut(Partial):
    def dual(self):
        return Shard(0)


class IsNoPartial(Partial):
    def is_partial(self, reduce_op=None):
        return False


class NamesNoReduction(Partial):
    def is_partial(self, reduce_op=None):
        return True


class RefusesEverything(Partial):
    def in_domain(self, x):
        return False


class FarTooExact(Partial):
    """An average is within two units, not none."""

    tolerance = 0


HOOK_FAULTS = [
    ("on_dim", ElsewhereAnotherCut(), r"on_dim\(1\)"),
    ("on_dim", TheOtherWay(), r"on_dim\(0\)"),
    ("names", NamedLikeAnother(), r"names\(\) of what"),
    ("on_dims", RenumbersWrongly(), r"on_dims\("),
    ("flat_group", FlattensInName(), r"flat_group\(\) is \(0, 1\)|tuple index|list index"),
    ("undivided", HeldByNobody(), "says undivided"),
    ("within", WithinForgetsTheOffset(), r"within\("),
    ("touched_dims", TouchesNothing(), r"touched_dims\(\) is \[\]"),
    ("touched_dims", TouchesAnotherDim(), r"touched_dims\(\)|cutting dim"),
    ("resolved", ResolvesToAnother(), r"ZigZag"),
    ("validate", ValidatesWithAnAssertion(), "raised ValueError"),
    ("split", DetachedSplit(), "gradient|does not require grad"),
    ("join", DetachedJoin(), "gradient|does not require grad"),
    ("any_size", AnySizeInName(), "any_size"),
    ("dual", AnotherDual(), r"dual\(\) is"),
    ("local_length", MiscountsItsRuns(0), r"local_length\(5\)"),
    ("runs", LostTail(0), "held by no coord"),
    ("moved", WrongOnDim(0), r"on_dim\(1\) = Backwards"),
    ("region", Hole(), "held by no coord"),
    ("local_shape", AnotherLocalShape(), r"local_shape\(\)"),
    ("cut_dims", CutsNothing(), r"cut_dims\(\)"),
    ("even", AlwaysEven(), r"even\(\)"),
    ("text", NotFrozen(1), "cannot be hashed"),
    ("combine", WiderResult(), r"combine\(\)"),
    ("combine_in_place", CombinesElsewhereInPlace(), r"combine_in_place\(\) is"),
    ("combine_in_place", OverwritesWhatIsNotFree(), "not free|changed"),
    ("embed", EmbedsTheValueItself(), r"embed\(\) of coord 0 is the value itself"),
    ("dual", DualIsACut(), r"dual\(\) is"),
    ("is_partial", IsNoPartial(), r"is_partial\(\) is False"),
    ("reduce_op", NamesNoReduction(), r"is_partial\(\) does not answer"),
    ("in_domain", RefusesEverything(), "in_domain"),
    ("tolerance", FarTooExact("avg"), r"combine\(embed\(x\)\)"),
    ("identity", WrongIdentity(), r"identity\(x\)"),
    ("linear", SaysLinear(), "not linear"),
    ("can_be_target", ForgetsTheLast(), r"combine\(embed"),
]


@pytest.mark.parametrize(
    ("hook", "placement", "message"), HOOK_FAULTS, ids=lambda value: type(value).__name__
)
def test_a_wrong_statement_beside_the_meaning_is_caught(hook, placement, message):
    assert hook in HOOKS
    with pytest.raises(BrokenLawError, match=message) as caught:
        check_placement(placement, axis_sizes=(1, 2, 3))
    assert type(placement).__name__ in str(caught.value)


def test_every_method_that_a_placement_may_define_has_a_law_and_a_planted_fault():
    """A new method of the bases joins both."""
    value = {"is_partition", "is_pending", "is_replicated"}  # the families: `is_a_value` checks them
    named = {
        name
        for base in (Placement, Partition, Pending, AlongDim)
        for name in (*vars(base), *getattr(base, "__annotations__", {}))
        if not name.startswith("_") and name not in {"dim", *value}
    }
    assert named == set(HOOKS)
    assert {hook for hook, _, _ in HOOK_FAULTS} == set(HOOKS)


FAULTS = [
    (Overlap(), "held more than once"),
    (Hole(), "held by no coord"),
    (OutOfBounds(), "leaves the tensor"),
    (WrongLocalShape(), "its boxes hold 0 elements, its local shape is"),
    (FlatLocalShape(), "has not 2 dims"),
    (AnotherLocalShape(), r"local_shape\(\) of coord 1"),
    (ReversedSplit(), r"split\(\) of coord 0 is \[1, 0\], its region holds \[0, 1\]"),
    (JoinedInAnotherOrder(), r"join\(split\(x\)\) is \[1, 0\], x is \[0, 1\]"),
    (JoinForgetsTheTail(), r"join\(split\(x\)\) is"),
    (CutsNothing(), r"cut_dims\(\) is \[\], the regions cut \[0\]"),
    (SkewedOrNot(), r"cut_dims\(\) is \[1\], the regions cut \[0, 1\]"),
    (TouchesNothing(), r"touched_dims\(\) is \[\]"),
    (AlwaysEven(), r"even\(\) is True"),
    (SecondCoordTwice(), "held more than once"),
    (FailsOnEmpty(), "raised ZeroDivisionError"),
    (NotARegion(), "not a Region"),
    (WrongRank(), "has not 2 dims"),
    (WrongOnDim(0), r"on_dim\(1\) = Backwards"),
    (LostTail(0), "element .* is held by no coord"),
    (NotFrozen(1), "cannot be hashed"),
    (ForgetsItself(1), "is not equal to"),
    (HalfOnEachCoord(), r"combine\(embed\(x\)\) is"),
    (SumsFully(), r"combine"),
    (ForgetsTheLast(), r"combine\(embed\(x\)\) is"),
    (ChangesItsTerms(), "changed its argument|combine|embed"),
    (WiderResult(), r"combine\(\) made torch.float64"),
    (WrongIdentity(), r"identity\(x\) is"),
    (SaysLinear(), "not linear"),
    (NotElementwise(), r"combine"),
]


@pytest.mark.parametrize(("placement", "message"), FAULTS, ids=lambda value: type(value).__name__)
def test_a_planted_fault_is_caught(placement, message):
    with pytest.raises(BrokenLawError, match=message) as caught:
        check_placement(placement, axis_sizes=(1, 2, 3))
    assert type(placement).__name__ in str(caught.value)


@dataclass(frozen=True)
class FirstReal(Pending):
    """Right: the first term that is a number. Its neutral term is equal to nothing, itself included."""

    def combine(self, locals):  # noqa: A002 - the word of the laws
        out = locals[0].clone()
        for term in locals[1:]:
            out = torch.where(out.isnan(), term, out)
        return out

    def embed(self, x, n, coord):
        return x.clone() if coord == 0 else torch.full_like(x, torch.nan)

    def in_domain(self, x):
        return x.dtype.is_floating_point


@dataclass(frozen=True)
class Divisor(Pending):
    """Right: the greatest common divisor, of whole numbers that are not negative."""

    def combine(self, locals):  # noqa: A002 - the word of the laws
        out = locals[0].clone()
        for term in locals[1:]:
            out = torch.gcd(out, term)
        return out

    def embed(self, x, n, coord):
        return x.clone() if coord == 0 else torch.zeros_like(x)

    def in_domain(self, x):
        return x.dtype == torch.int64 and bool((x >= 0).all())


@pytest.mark.parametrize("right", [Rows(), FirstReal(), Divisor()], ids=lambda value: type(value).__name__)
def test_the_placement_without_the_fault_passes(right):
    check_placement(right, axis_sizes=(1, 2, 3))


def test_the_counterexample_is_the_smallest_and_can_be_read():
    with pytest.raises(BrokenLawError) as caught:
        check_placement(Hole())
    assert str(caught.value).splitlines() == [
        "Hole() breaks the law 'regions make up the tensor' for shape (1,) on an axis of size 2:",
        "element (0,) is held by no coord",
        "  coord 0 holds Region(boxes=(), local_shape=(0,))",
        "  coord 1 holds Region(boxes=(), local_shape=(0,))",
    ]


def test_a_placement_that_refuses_everything_is_not_passed():
    class Never(Rows):
        def validate(self, shape, n):
            raise PlacementError("never")

    with pytest.raises(BrokenLawError, match="refuses every shape"):
        check_placement(Never())


def test_an_axis_size_that_a_placement_needs_is_found():
    check_placement(Ragged((1, 0, 2, 1)))
    with pytest.raises(BrokenLawError, match="refuses every shape"):
        check_placement(Ragged((1, 0, 2, 1)), axis_sizes=(3,))


def test_a_placement_of_matrices_need_not_say_so():
    """Twenty lines without a check of the shape: numbers of dims that it cannot take are left out."""

    @dataclass(frozen=True)
    class Columns(Partition):
        def region(self, shape, n, coord):
            rows, columns = shape
            mine = range(coord, columns, n)
            boxes = [Box((row, column), (1, 1)) for row in range(rows) for column in mine]
            return Region(boxes, (rows, len(mine)))

    check_placement(Columns())
    with pytest.raises(BrokenLawError, match="refuses every shape"):
        check_placement(Rows(), axis_sizes=())


class TestLawsAsAClass(PlacementLaws):
    """The pytest class that users subclass."""

    placements = (Rows(),)
    axis_sizes = (2, 3)


def test_the_class_fails_on_a_fault_and_on_nothing_to_check():
    class Faulty(PlacementLaws):
        placements = (Hole(),)

    with pytest.raises(BrokenLawError):
        Faulty().test_every_law_holds()
    with pytest.raises(BrokenLawError, match="names no placements"):
        PlacementLaws().test_placements_are_named()
