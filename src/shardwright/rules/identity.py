"""What a coord contributes to a reduction when it holds no elements."""

from __future__ import annotations

import torch

from shardwright.errors import RuleError
from shardwright.placement.base import Pending, Placement


def identity_of(placement: Placement, dtype: torch.dtype) -> float | int | bool:
    """What a coord without elements holds so that the reduction ignores it: 0, 1, or an extreme value.

    Raises: RuleError: the placement is no reduction, or one without an identity.
    """
    if not isinstance(placement, Pending):
        raise RuleError(f"{placement} reduces nothing, so it has no identity")
    filled = placement.identity(torch.zeros((), dtype=dtype))
    if filled is None:
        raise RuleError(f"{placement} has no identity for {dtype}")
    value: float | int | bool = filled.item()
    return value
