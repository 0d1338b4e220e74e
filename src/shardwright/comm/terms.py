"""The terms of a reduction on one rank, each a tensor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwright.plan.steps import Combine


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms in the order of their coordinates. free: which ones nobody else looks at, to be overwritten."""

    parts: Sequence[Tensor]
    free: Sequence[bool]

    def combined(self, step: Combine, sizes: tuple[int, ...]) -> Tensor:
        """The finished value, the last Pending first:  q1 * q2 .. tensors [...] -> [...]."""
        parts, free = list(self.parts), list(self.free)
        for axis, pending in reversed(step.pendings):
            n = sizes[axis]
            groups = range(0, len(parts), n)
            parts = [pending.combine_in_place(parts[i : i + n], free[i : i + n]) for i in groups]
            free = [True] * len(parts)
        return parts[0]


def stacked(x: Tensor) -> Terms:
    """The terms along dim 0; none is overwritten, for a result that is one of them would keep them all."""
    return Terms(x.unbind(0), [False] * x.shape[0])
