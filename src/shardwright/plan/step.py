"""What every step of a plan answers. A new kind of step is one class that answers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwright.plan.lines import Ints
from shardwright.plan.work import Seat, Work

NONE: Ints = np.zeros((), dtype=np.int64)


class Holds(NamedTuple):
    """Elements that ranks hold around a step: arrays that broadcast over the ranks of the plan.

    beside: while it runs, beside what it is given. made: what it leaves. term: one term of that.
    late: buffers that the backend's thread may let go a moment after the step; None: it has none of its own,
    and those of the step before may still be there.
    """

    beside: Ints
    made: Ints
    term: Ints
    late: Ints | None = None


class Step(ABC):
    """One step of a plan, for all ranks at once; no data and no process group.

    rounds: how often it waits for another rank. moved: elements that cross between ranks, over all ranks.
    axes: those over which ranks communicate in it.
    """

    rounds: int = 0
    moved: int = 0
    axes: tuple[int, ...] = ()

    @property
    def form(self) -> tuple[object, ...]:
        """Steps of equal form, of plans that run together, can share a collective."""
        return (type(self),)

    @abstractmethod
    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`. axes: the names of the mesh's axes; none between two meshes."""

    @abstractmethod
    def work(self, seat: Seat) -> Work:
        """What one rank does."""

    @abstractmethod
    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:
        """What ranks hold around it. term: one term of what it is given."""

    def traffic(self) -> tuple[Ints, Ints]:
        """Elements that each rank sends and receives: arrays that broadcast over the ranks of the plan."""
        return NONE, NONE

    def crossing(self, slow: frozenset[int]) -> int:  # noqa: ARG002 - nothing crosses
        """Elements that cross between ranks which differ on one of these axes, over all ranks."""
        return 0


def most_held(steps: Sequence[Step], dtype: torch.dtype) -> tuple[Ints, Ints]:
    """The most elements that ranks hold over these steps, beside what they start from; and late buffers.

    An upper bound for every way in which a step may be run: what a step starts from (unless that is the
    source), what it makes, the buffers between, and those of the step before it, which the backend's thread
    may let go a moment late. Not counted: what a reduction of the user's own allocates in `combine`, and a
    copy of a source that is not stored as its layout says.
    """
    most = given = term = late = NONE
    for step in steps:
        holds = step.holds(term, dtype)
        most = np.maximum(most, given + holds.beside + late)
        given, term = holds.made, holds.term
        late = late if holds.late is None else holds.late
    return most, late
