"""What a coord contributes to a reduction when it holds no elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwright.compat import without_modes
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending, Placement


def identity_of(placement: Placement, dtype: torch.dtype) -> float | int | bool:
    """What a coord without elements holds so that the reduction ignores it: 0, 1, or an extreme value.

    Raises: RuleError: the placement is no reduction, or one without an identity.
    """
    if not isinstance(placement, Pending):
        raise RuleError(f"{placement} reduces nothing, so it has no identity")
    with without_modes():  # a number, also where tensors without data are traced
        filled = placement.identity(torch.zeros((), dtype=dtype, device="cpu"))
        value: float | int | bool | None = None if filled is None else filled.item()
    if value is None:
        raise RuleError(f"{placement} has no identity for {dtype}")
    return value


def reduction_of_cuts(output: Layout, inputs: Iterable[Layout]) -> Placement | None:
    """The reduction that ignores what a coord without elements holds: of an axis that cuts an operand.

    What is pending on another axis was so before: the same on each of its coords, it is no one's value.
    """
    pending = output.pending_axes
    cut = {axis for layout in inputs for axis in pending if layout.placements[axis].is_partition}
    return output.placements[min(cut or pending)] if pending else None
