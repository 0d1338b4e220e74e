"""What one rank holds and does in a step, as data: the few things that an executor can do, whatever the step.

A step answers with one of these for every seat; an executor knows these and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from torch import Tensor

from shardwright.index.overlap import Strided
from shardwright.placement.base import Pending

# A rank of a plan: its coordinates on the one mesh, or its number in the world where there are two.
Seat = tuple[int, ...] | int


class TermsOf(NamedTuple):
    """The `n` terms of a Pending on an axis of a mesh."""

    axis: int
    pending: Pending
    n: int

    def text(self, axes: tuple[str, ...]) -> str:
        """How a plan names them: by the axis, or between two meshes, where none is meant, by their number."""
        return f"{self.pending} of {axes[self.axis]}" if axes else f"{self.n} terms of {self.pending}"


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms in the order of their coordinates. free: which ones nobody else looks at, to be overwritten."""

    parts: Sequence[Tensor]
    free: Sequence[bool]

    def combined(self, pendings: Sequence[TermsOf]) -> Tensor:
        """The finished value, the last Pending first:  q1 * q2 .. tensors [...] -> [...].

        A rank that holds nothing calls no kernel.
        """
        parts, free = list(self.parts), list(self.free)
        if not parts[0].numel():
            return parts[0]
        for _, pending, n in reversed(pendings):
            groups = range(0, len(parts), n)
            parts = [pending.combine_in_place(parts[i : i + n], free[i : i + n]) for i in groups]
            free = [True] * len(parts)
        return parts[0]


def stacked(x: Tensor) -> Terms:
    """The terms along dim 0; none is overwritten, for a result that is one of them would keep them all."""
    return Terms(x.unbind(0), [False] * x.shape[0])


# What a step is given and leaves: the local tensor, or the terms of it that have arrived.
Held = Tensor | Terms


@dataclass(frozen=True)
class Memory:
    """Shape and stride that a local tensor must have for views into it to be right."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Filling:
    """A term made by padding: the identity of a Pending where nothing is put, and all that is put scaled."""

    pending: Pending
    scale: int = 1


@dataclass(frozen=True, slots=True)
class Move:
    """Copy inside the rank: (from, to) views. nothing: the result is the source as it is."""

    source: Memory
    target: Memory
    views: tuple[tuple[Strided, Strided], ...]
    nothing: bool = False
    filling: Filling | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """What goes to one member and comes from it: views into the source, and into the result's term `term`."""

    member: Seat
    send: tuple[Strided, ...]
    receive: tuple[Strided, ...]
    term: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """Messages between this rank, at `own`, and others.

    kept: what the rank puts into the result itself, into the term `own_term` of `terms`; `kept.target` is
    one term, or (0 terms) the result. shares: the members; this rank may be one, for a collective that
    carries what it keeps too. axes: on which the members differ, none between two meshes. gather: what is
    for one is for all. moved: elements that cross, over all ranks; repeated: some of them to several.
    """

    kept: Move
    own: Seat
    shares: tuple[Share, ...]
    terms: int = 0
    own_term: int = 0
    axes: tuple[int, ...] = ()
    gather: bool = False
    moved: int = 0
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Reduction:
    """The backend's reduction over one axis of a tensor that lies so."""

    memory: Memory
    axis: int
    op: str


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of what the rank holds."""

    function: Callable[[Held], Tensor]


@dataclass(frozen=True, slots=True)
class InPieces:
    """The works of each piece on the same source, and where the piece then belongs in the result."""

    target: Memory
    pieces: tuple[tuple[tuple[Work, ...], Move], ...]


Work = Move | Transfer | Reduction | Apply | InPieces
