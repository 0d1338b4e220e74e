"""The terms of a reduction on one rank, each a tensor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardwright.placement.base import Pending


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
