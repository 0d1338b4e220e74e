"""What it costs to bring operands to the placements that a candidate needs: an estimate, not a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.placement.base import Placement


@dataclass(frozen=True, slots=True, order=True)
class Price:
    """Compared field by field.

    Args:
        rewritten: mutated operands that would have to be moved and written back.
        bytes: bytes that each rank sends, about.
        work: the share of the whole computation that each rank does.
        moves: operands that change their placement.
    """

    rewritten: int
    bytes: int
    work: float
    moves: int

    @property
    def free(self) -> bool:
        """Whether nothing has to be sent."""
        return self.rewritten == 0 and self.bytes == 0


def move_bytes(source: Placement, target: Placement, size: int, n: int) -> int:
    """Bytes that each of n ranks sends to change the placement of a tensor of `size` bytes on one axis.

    Slicing what is whole and embedding it into a pending sum send nothing; a reduce-scatter and a gather
    send (n-1)/n of the tensor, an all-reduce both, an all-to-all 1/n of that.
    """
    if source == target or source.is_replicated or n == 1:
        return 0
    size = max(size, n * n)  # an empty tensor too: what is chosen must not depend on who has rows
    share = size * (n - 1) // n
    if source.is_pending:
        return share if target.is_partition else 2 * share
    return share // n if target.is_partition else share


def joint_bytes(
    source: Sequence[Placement], target: Sequence[Placement], size: int, sizes: Sequence[int]
) -> int:
    """`move_bytes` over all axes: what another axis keeps cut is that much smaller."""
    if source == target:
        return 0
    total = 0
    for axis, n in enumerate(sizes):
        if source[axis] != target[axis]:
            others = (m for other, m in enumerate(sizes) if other != axis and target[other].is_partition)
            total += move_bytes(source[axis], target[axis], size // max(1, prod(others)), n)
    return total
