"""The steps of a plan: what every rank does, as data. None names a rank; `transfer` makes a rank's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwright.plan.holders import Map, SlabMap
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

    @cached_property
    def term_count(self) -> int:
        """How many terms of each element arrive."""
        return prod([self.source.sizes[axis] for axis in self.terms])

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
    """The same steps for one part of the tensor after the other, so that only one part's buffers are held.

    whole: the steps as they would be for all elements at once. count: how many parts. make: the steps of a
    part, which end in the map of this part. target: where all parts together belong.
    """

    whole: tuple[Step, ...]
    count: int
    make: Callable[[int], tuple[tuple[Step, ...], SlabMap]]
    target: Map

    @cached_property
    def _made(self) -> list[tuple[tuple[Step, ...], SlabMap]]:
        return [self.make(part) for part in range(self.count)]

    @property
    def parts(self) -> tuple[tuple[Step, ...], ...]:
        """The steps of each part. Made when first asked for: to decide on a count, the largest will do."""
        return tuple(steps for steps, _ in self._made)

    @property
    def slabs(self) -> tuple[SlabMap, ...]:
        """Where the elements of each part belong."""
        return tuple(slab for _, slab in self._made)

    @cached_property
    def largest(self) -> tuple[Step, ...]:
        """The steps of the last part: for no rank is another one larger."""
        return self.make(self.count - 1)[0]

    @property
    def rounds(self) -> int:
        """Those of one part: pieces are no rounds."""
        return sum(step.rounds for step in self.whole)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        return f"in {self.count} pieces: " + "; ".join(step.describe(axes) for step in self.whole)

    @property
    def form(self) -> tuple[object, ...]:
        """Its own: a tensor that is moved in pieces to save memory is not packed with others."""
        return (type(self), id(self))


Step = LocalMove | Exchange | AllReduce | Combine | Place | Embed | Pieces


def moves_of(steps: tuple[Step, ...], *, in_pieces: bool = True) -> list[Exchange | AllReduce]:
    """The steps in which elements cross between ranks: of every piece, or as if all went at once."""
    moves: list[Exchange | AllReduce] = []
    for step in steps:
        if isinstance(step, Pieces):
            for part in step.parts if in_pieces else (step.whole,):
                moves += moves_of(part)
        elif isinstance(step, Exchange | AllReduce):
            moves.append(step)
    return moves


def _names(which: tuple[int, ...], axes: tuple[str, ...]) -> str:
    names = [axes[axis] for axis in which]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"
