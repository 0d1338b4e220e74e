"""The steps of a plan: what every rank does, as data. None names a rank; `transfer` makes a rank's part."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.plan.maps import Map, SlabMap
from shardwright.plan.pending import AxisPending


@dataclass(frozen=True, eq=False)
class LocalMove:
    """Take from the own local tensor what the target map wants; nothing travels."""

    source: Map
    target: Map

    rounds = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share a collective."""
        return (type(self),)

    def describe(self, axes: tuple[str, ...]) -> str:  # noqa: ARG002 - no axis takes part
        """One line for `str(plan)`."""
        return "local: take the part that stays"


@dataclass(frozen=True, eq=False)
class Exchange:
    """Ranks that differ on `axes` send each other exactly the missing elements.

    terms: the reduced axes, in order; the result then has a leading dim with one term per coordinate of them.
    gather: all members send their whole local tensor, of one size, to all: the native all-gather serves.
    """

    source: Map
    target: Map
    axes: tuple[int, ...]
    terms: tuple[int, ...] = ()
    gather: bool = False

    @property
    def rounds(self) -> int:
        """One, unless every rank is alone."""
        return 1 if self.axes else 0

    @property
    def term_count(self) -> int:
        """How many terms of each element arrive."""
        return prod(self.source.sizes[axis] for axis in self.terms)

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share a collective."""
        return (type(self), self.axes, self.terms, self.gather)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        what = "all-gather" if self.gather else "exchange"
        kept = " of the terms" if self.terms else " of the missing elements"
        return f"{what}{kept} over {_names(self.axes, axes)}"


@dataclass(frozen=True, eq=False)
class AllReduce:
    """The backend's all-reduce of the local tensors of a map, over one axis."""

    map: Map
    axis: int
    op: str

    rounds = 1

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share a collective."""
        return (type(self), self.axis, self.op)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return f"all-reduce ({self.op}) over {axes[self.axis]}"


@dataclass(frozen=True, eq=False)
class Combine:
    """Combine the terms in the leading dim, the last of `pendings` first."""

    pendings: tuple[AxisPending, ...]

    rounds = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share a collective."""
        return (type(self), self.pendings)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return "local: combine " + ", then ".join(f"{p} of {axes[a]}" for a, p in reversed(self.pendings))


@dataclass(frozen=True, eq=False)
class Place:
    """Put the elements that a rank has into a tensor filled with the identity of a Pending."""

    source: Map
    target: Map
    pendings: tuple[AxisPending, ...]

    rounds = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share a collective."""
        return (type(self), self.pendings)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return "local: pad with the identity of " + ", ".join(f"{p} of {axes[a]}" for a, p in self.pendings)


@dataclass(frozen=True, eq=False)
class Embed:
    """Make each rank's term of a Pending from the finished value."""

    pendings: tuple[AxisPending, ...]

    rounds = 0

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form can share a collective."""
        return (type(self), self.pendings)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return "local: embed as " + ", ".join(f"{p} of {axes[a]}" for a, p in self.pendings)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The same steps for one slab of the tensor after the other, so that only one slab's buffers are held.

    parts: the steps of each slab, which end in its map of `slabs`. target: where all slabs together belong.
    """

    parts: tuple[tuple[Step, ...], ...]
    slabs: tuple[SlabMap, ...]
    target: Map

    @property
    def rounds(self) -> int:
        """Those of one slab: pieces are no rounds."""
        return sum(step.rounds for step in self.parts[0])

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return f"in {len(self.parts)} pieces: " + "; ".join(step.describe(axes) for step in self.parts[0])

    @property
    def form(self) -> tuple[object, ...]:
        """Its own: a tensor that is moved in pieces to save memory is not packed with others."""
        return (type(self), id(self))


Step = LocalMove | Exchange | AllReduce | Combine | Place | Embed | Pieces


def moves_of(steps: tuple[Step, ...]) -> list[Exchange | AllReduce]:
    """The steps in which elements cross between ranks, those of every piece included."""
    moves: list[Exchange | AllReduce] = []
    for step in steps:
        if isinstance(step, Pieces):
            moves += [move for part in step.parts for move in moves_of(part)]
        elif isinstance(step, Exchange | AllReduce):
            moves.append(step)
    return moves


def _names(which: tuple[int, ...], axes: tuple[str, ...]) -> str:
    names = [axes[axis] for axis in which]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
