"""The steps of a plan between two meshes that need nobody else, and the step that runs others in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.index.grid import overlaps
from shardwright.index.overlap import Strided, paired_views
from shardwright.placement.base import Pending
from shardwright.plan.carry import Carry
from shardwright.plan.rank_map import RankMap

# A Pending and the size of its axis.
Sized = tuple[Pending, int]


@dataclass(frozen=True, eq=False)
class Finish:
    """Combine the terms in the leading dim, the last of `pendings` first:  [q1 * q2 .., ...] -> [...]."""

    pendings: tuple[Sized, ...]
    source: RankMap

    rounds = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share messages."""
        return (type(self),)

    def describe(self, axes: tuple[str, ...]) -> str:  # noqa: ARG002 - ranks take part, not axes
        """One line for `str(plan)`."""
        return "local: combine " + ", then ".join(f"{n} terms of {p}" for p, n in reversed(self.pendings))

    def held(self, rank: int) -> int:
        """The terms, the results of the last Pending, and one more while they are combined one by one."""
        terms = prod(n for _, n in self.pendings)
        results = terms // self.pendings[-1][1]
        return (terms + results + 1) * self.source.memory(rank).numel


@dataclass(frozen=True, eq=False)
class Term:
    """Make each rank's term of the target's Pendings from the finished value, the first one first."""

    pendings: tuple[Sized, ...]
    target: RankMap

    rounds = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share messages."""
        return (type(self),)

    def coords(self, rank: int) -> tuple[int, ...]:
        """The rank's coordinate on each of the Pending axes."""
        layout = self.target.layout
        if layout is None or rank not in self.target.place_of:
            return ()
        coords = layout.coords_of(rank)
        return tuple(coords[axis] for axis in layout.order if layout.placements[axis].is_pending)

    def describe(self, axes: tuple[str, ...]) -> str:  # noqa: ARG002 - ranks take part, not axes
        """One line for `str(plan)`."""
        return "local: embed as " + ", ".join(f"one of {n} terms of {p}" for p, n in self.pendings)

    def held(self, rank: int) -> int:
        """The value and its term."""
        return 2 * self.target.memory(rank).numel


@dataclass(frozen=True, eq=False)
class Slabs:
    """The same steps for one slab of the tensor after the other, so that only one slab's buffers are held.

    parts: the steps of each slab, which end in its map of `slabs`. target: where all slabs together belong.
    """

    parts: tuple[tuple[InSlab, ...], ...]
    slabs: tuple[RankMap, ...]
    target: RankMap

    @property
    def rounds(self) -> int:
        """Those of one slab: pieces are no rounds."""
        return max(sum(step.rounds for step in steps) for steps in self.parts)

    @property
    def form(self) -> tuple[object, ...]:
        """Its own: a tensor that is moved in pieces to save memory is not packed with others."""
        return (type(self), id(self))

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return f"in {len(self.parts)} pieces: " + "; ".join(step.describe(axes) for step in self.parts[0])

    def held(self, rank: int) -> int:
        """The result, and what the largest piece needs."""
        inside = max(held_by(steps, rank) for steps in self.parts)
        return self.target.memory(rank).numel + inside

    def views(self, piece: int, rank: int) -> tuple[tuple[Strided, Strided], ...]:
        """Where a rank's part of one slab belongs in the result."""
        return tuple(paired_views(overlaps(self.slabs[piece].cell(rank), self.target.cell(rank))))


InSlab = Carry | Finish
Between = Carry | Finish | Term | Slabs


def held_by(steps: tuple[Between, ...], rank: int) -> int:
    """The most elements that a rank holds beside its source at any time.

    What a step is given counts as held while it runs, unless it is the plan's source.
    """
    most = given = 0
    for step in steps:
        needed = step.held(rank)
        if isinstance(step, Carry):
            needed += given
            given = step.copies * step.target.memory(rank).numel
        elif isinstance(step, Finish):
            given = step.source.memory(rank).numel
        most = max(most, needed)
    return most


def carries_of(steps: tuple[Between, ...]) -> list[Carry]:
    """The steps in which elements cross between ranks, those of every piece included."""
    found: list[Carry] = []
    for step in steps:
        if isinstance(step, Slabs):
            found += [carry for part in step.parts for carry in carries_of(part)]
        elif isinstance(step, Carry):
            found.append(step)
    return found
