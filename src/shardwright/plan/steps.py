"""The steps in which every rank of one mesh does the same: local ones, the backend's all-reduce, pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import cast

import numpy as np
import torch
from torch import Tensor

from shardwright.compat.graph_order import made_of
from shardwright.index.overlap import overlaps, paired_views
from shardwright.layout.dtypes import HALF
from shardwright.plan.cost import over_all_ranks, without
from shardwright.plan.holders import Map
from shardwright.plan.lines import Ints
from shardwright.plan.rank_map import RankMap
from shardwright.plan.step import NONE, Holds, Step, most_held
from shardwright.plan.work import Apply, Filling, InPieces, Move, Reduction, Seat, Terms, TermsOf, stacked

# Dtypes that the backends reduce themselves; the others are carried by one of 4 bytes.
_REDUCED = HALF | {torch.int8, torch.uint8}


@dataclass(frozen=True, eq=False)
class LocalMove(Step):
    """Take from the own local tensor what the target map wants; nothing travels."""

    source: Map
    target: Map

    def describe(self, axes: tuple[str, ...]) -> str:  # noqa: ARG002 - no axis takes part
        """One line for `str(plan)`."""
        return "local: take the part that stays"

    def work(self, seat: Seat) -> Move:
        """What one rank copies."""
        return local_move(self.source, self.target, seat)

    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:  # noqa: ARG002 - a copy of any
        """What it makes."""
        made = self.target.counts
        return Holds(made, made, made)


@dataclass(frozen=True, eq=False)
class Place(Step):
    """Put the elements that a rank has into a tensor filled with the identity of a Pending."""

    source: Map
    target: Map
    pendings: tuple[TermsOf, ...]

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return "local: pad with the identity of " + ", ".join(p.text(axes) for p in self.pendings)

    def work(self, seat: Seat) -> Move:
        """What one rank copies."""
        return local_move(self.source, self.target, seat, filling_of(self.pendings))

    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:  # noqa: ARG002 - as many of any
        """What it makes, and what asking for the domain of the values may."""
        made = self.target.counts
        return Holds(2 * made + self.source.counts, made, made)


@dataclass(frozen=True, eq=False)
class Combine(Step):
    """Combine the terms that arrived, the last of `pendings` first."""

    pendings: tuple[TermsOf, ...]

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return "local: combine " + ", then ".join(p.text(axes) for p in reversed(self.pendings))

    def work(self, seat: Seat) -> Apply:  # noqa: ARG002 - the same everywhere
        """The same on every rank."""
        return Apply(lambda x: (x if isinstance(x, Terms) else stacked(x)).combined(self.pendings))

    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:
        """All results of one Pending before the next one is combined, and totals under way."""
        left = prod(p.n for p in self.pendings)
        made = 0
        for of in reversed(self.pendings):
            left //= of.n
            made += left
        total = 4 if dtype in HALF else 1  # two float32 totals, or one more of the dtype
        return Holds((made + total) * term, term, term)


@dataclass(frozen=True, eq=False)
class Embed(Step):
    """Make each rank's term of the target's Pendings from the finished value, the first one first."""

    pendings: tuple[TermsOf, ...]
    target: Map | RankMap

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        one = "" if axes else "one of "
        return "local: embed as " + ", ".join(one + p.text(axes) for p in self.pendings)

    def work(self, seat: Seat) -> Apply:
        """Each rank makes its own."""
        coords = self.target.coords(seat)
        return Apply(lambda held: self._embedded(cast("Tensor", held), coords))

    def _embedded(self, x: Tensor, coords: tuple[int, ...]) -> Tensor:
        for axis, pending, n in self.pendings if coords else ():
            term = pending.embed(x, n, coords[axis])
            x = made_of(term, x) if coords[axis] and torch.compiler.is_compiling() else term
        return x

    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:  # noqa: ARG002 - tensors of the target only
        """A term, and the one that the next is made of."""
        made = self.target.counts
        return Holds(min(len(self.pendings), 2) * made, made, made)


@dataclass(frozen=True, eq=False)
class AllReduce(Step):
    """The backend's all-reduce of the local tensors of a map, over one axis."""

    map: Map
    axis: int
    op: str

    rounds = 1

    @property
    def axes(self) -> tuple[int, ...]:  # type: ignore[override]
        """The one axis."""
        return (self.axis,)

    @cached_property
    def moved(self) -> int:  # type: ignore[override]
        """How many elements cross between ranks."""
        cut = self.map.cut | {self.axis}
        return 2 * (self.map.sizes[self.axis] - 1) * self.map.elements * without(self.map.sizes, cut)

    @property
    def form(self) -> tuple[object, ...]:
        """Over the same axis, of the same kind."""
        return (type(self), self.axis, self.op)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return f"all-reduce ({self.op}) over {axes[self.axis]}"

    def work(self, seat: Seat) -> Reduction:
        """What one rank gives."""
        return Reduction(self.map.memory(seat), self.axis, self.op)

    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:  # noqa: ARG002 - the whole is reduced
        """The result; of a dtype that the backends do not reduce, a wider one of it and its result too."""
        made = self.map.counts
        reduced = dtype.itemsize >= 4 or dtype in _REDUCED
        return Holds(made * (1 if reduced else 1 + 2 * (4 // dtype.itemsize)), made, made)

    def traffic(self) -> tuple[Ints, Ints]:
        """Elements that each rank sends and receives."""
        n = self.map.sizes[self.axis]
        moved = -(-2 * (n - 1) * self.map.counts // n)
        return moved, moved

    def crossing(self, slow: frozenset[int]) -> int:
        """All of it, or nothing."""
        n = self.map.sizes[self.axis]
        crosses = self.axis in slow
        return 2 * (n - 1) * over_all_ranks(self.map.counts, self.map.sizes) // n if crosses else 0


@dataclass(frozen=True, eq=False)
class Pieces(Step):
    """The same steps for one part of the tensor after the other, so that only one part's buffers are held.

    whole: the steps as they would be for all elements at once. count: how many parts. make: the steps of a
    part, which end in the map of this part. target: where all parts together belong. larger: the parts of
    which one is the largest, for every rank.
    """

    whole: tuple[Step, ...]
    count: int
    make: Callable[[int], tuple[tuple[Step, ...], Map | RankMap]]
    target: Map | RankMap
    larger: Iterable[int]

    @cached_property
    def _made(self) -> list[tuple[tuple[Step, ...], Map | RankMap]]:
        """Made when first asked for: to decide on a count, the largest will do."""
        return [self.make(part) for part in range(self.count)]

    @cached_property
    def rounds(self) -> int:  # type: ignore[override]
        """Those of one part: pieces are no rounds."""
        return sum(step.rounds for step in self.whole)

    @cached_property
    def moved(self) -> int:  # type: ignore[override]
        """What the whole would."""
        return sum(step.moved for step in self.whole)

    @cached_property
    def axes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Those of the step that crosses most."""
        return max((step.axes for step in self.whole), key=len)

    @property
    def form(self) -> tuple[object, ...]:
        """Its own: a tensor that is moved in pieces to save memory is not packed with others."""
        return (type(self), id(self))

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return f"in {self.count} pieces: " + "; ".join(step.describe(axes) for step in self.whole)

    def work(self, seat: Seat) -> InPieces:
        """The works of all pieces."""
        pieces = tuple(
            (tuple([step.work(seat) for step in steps]), local_move(slab, self.target, seat))
            for steps, slab in self._made
        )
        return InPieces(self.target.memory(seat), pieces)

    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:  # noqa: ARG002 - all pieces start from the source
        """The result, with the parts done so far, and what a part needs."""
        inside = late = NONE
        for part in self.larger:
            most, after = most_held(self.make(part)[0], dtype)
            inside, late = np.maximum(inside, most), np.maximum(late, after)
        made = self.target.counts
        return Holds(made + inside + late, made, made, late)

    def traffic(self) -> tuple[Ints, Ints]:
        """That of all parts."""
        of_parts = [step.traffic() for steps, _ in self._made for step in steps]
        return total(of_parts)

    def crossing(self, slow: frozenset[int]) -> int:
        """What the whole would."""
        return sum(step.crossing(slow) for step in self.whole)


def total(traffics: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """What ranks send, and what they receive, in all."""
    sent, received = NONE, NONE
    for mine, theirs in traffics:
        sent, received = sent + mine, received + theirs
    return sent, received


def filling_of(pendings: Sequence[TermsOf]) -> Filling:
    """How a value is padded to be a term of all these, which have one identity.

    An average divides by the size of its axis, whatever the other ranks hold.
    """
    scale = prod(of.n for of in pendings if of.pending.reduce_op == "avg")
    return Filling(pendings[0].pending, scale)


def local_move(
    source: Map | RankMap, target: Map | RankMap, seat: Seat, filling: Filling | None = None
) -> Move:
    """What one rank has of what it wants, as a copy inside itself."""
    views = tuple(paired_views(overlaps(source.cell(seat), target.cell(seat))))
    held, wanted = source.memory(seat), target.memory(seat)
    nothing = filling is None and held == wanted and all(a == b for a, b in views)
    return Move(held, wanted, views, nothing, filling)
