"""What a rank holds while it runs the steps of a plan, beside the tensor that it starts from.

An upper bound for every way in which a step may be run: what a step starts from (unless that is the source),
what it makes, the buffers between, and those of the exchange before it, which the backend's thread may let
go a moment late. Not counted: what a reduction of the user's own allocates in `combine`, and a copy of a
source that is not stored as its layout says.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from shardwright.layout.dtypes import HALF
from shardwright.layout.layout import Layout
from shardwright.plan.cost import shared_counts, traffic
from shardwright.plan.holders import LayoutMap
from shardwright.plan.lines import Ints
from shardwright.plan.steps import AllReduce, Combine, Embed, Exchange, LocalMove, Pieces, Place, Step

# Dtypes that the backends reduce themselves; the others are carried by one of 4 bytes.
_REDUCED = HALF | {torch.int8, torch.uint8}


def peak_elements(steps: Sequence[Step], result: Layout) -> int:
    """The most elements that one rank holds over these steps, beside what it starts from."""
    return int(_Held(result).over(steps).max())


class _Held:
    """What each rank holds, step by step: one dim per axis, 1 long where it makes no difference."""

    def __init__(self, result: Layout) -> None:
        self.result = result
        self.given = np.zeros((1,) * len(result.sizes), dtype=np.int64)  # what the step starts from
        self.part = self.given  # one term of it
        self.late = self.given  # buffers of the exchange before

    def over(self, steps: Sequence[Step]) -> Ints:
        """The most over these steps; afterwards `given` is what the last one made."""
        most = self.given
        for step in steps:
            late = self.late
            work, made, part = self._of(step)
            most = np.maximum(most, self.given + work + late)
            self.given, self.part = made, part
        return most

    def _of(self, step: Step) -> tuple[Ints, Ints, Ints]:
        """What a step holds beside what it starts from, what it leaves, and one term of that."""
        if isinstance(step, Exchange):
            return self._exchange(step)
        if isinstance(step, Combine):
            return self._combine(step)
        if isinstance(step, Pieces):
            # All pieces start from the source; the parts done so far are in the result.
            piece = _Held(self.result)
            inside = piece.over(step.largest)
            self.late = piece.late
            return step.target.counts + inside + piece.late, step.target.counts, step.target.counts
        if isinstance(step, AllReduce):
            made = step.map.counts
            return made * _all_reduce_copies(self.result.dtype), made, made
        if isinstance(step, LocalMove):
            made = step.target.counts
            return made, made, made
        if isinstance(step, Place):
            made = step.target.counts
            return 2 * made + step.source.counts, made, made  # the empty tensor, the identity, a scaled part
        return self._embed(step)

    def _exchange(self, step: Exchange) -> tuple[Ints, Ints, Ints]:
        sent, got = traffic(step)
        own, wanted = shared_counts(step.source, step.target), step.target.counts
        made = step.term_count * wanted
        self.late = sent + np.maximum(got, own)  # the own part may travel through a buffer
        return made + self.late, made, wanted

    def _combine(self, step: Combine) -> tuple[Ints, Ints, Ints]:
        left = prod(self.result.sizes[axis] for axis, _ in step.pendings)
        made = 0
        for axis, _ in reversed(step.pendings):
            left //= self.result.sizes[axis]
            made += left  # all results of this axis, before the next one is combined
        total = 4 if self.result.dtype in HALF else 1  # two float32 totals, or one more of the dtype
        return (made + total) * self.part, self.part, self.part

    def _embed(self, step: Embed) -> tuple[Ints, Ints, Ints]:
        made = LayoutMap(self.result).counts
        return min(len(step.pendings), 2) * made, made, made


def _all_reduce_copies(dtype: torch.dtype) -> int:
    if dtype.itemsize >= 4 or dtype in _REDUCED:
        return 1
    return 1 + 2 * (4 // dtype.itemsize)  # widened, reduced, and back
