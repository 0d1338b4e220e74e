"""The reductions that rules name, as pending placements."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwright.errors import RuleError
from shardwright.placement.base import Pending, Placement
from shardwright.placement.partial import Partial

_NAMES = {
    "sum": "sum",
    "avg": "avg",
    "max": "max",
    "min": "min",
    "product": "product",
    "prod": "product",
    "norm2": "norm2",
    # On bools: or, and.
    "any": "max",
    "all": "min",
}
_PLACEMENTS: dict[str, Pending] = {name: Partial(op) for name, op in _NAMES.items()}


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# Where a reduction has no meaning: a sum of bools, an average of integers, an extreme of complex numbers.
_REFUSED: dict[str, Callable[[torch.dtype], bool]] = {
    "sum": lambda dtype: dtype == torch.bool,
    "avg": lambda dtype: not _is_inexact(dtype),
    "max": lambda dtype: dtype.is_complex,
    "min": lambda dtype: dtype.is_complex,
}


def pending_of(name: str) -> Pending:
    """The pending placement of a reduction by its name in rules. Raises: RuleError: there is none."""
    try:
        return _PLACEMENTS[name]
    except KeyError:
        raise RuleError(f"unknown reduction {name!r}; rules may use {', '.join(_NAMES)}") from None


def has_meaning(name: str, dtype: torch.dtype) -> bool:
    """Whether values of this dtype can be reduced so."""
    refused = _REFUSED.get(_NAMES.get(name, name))
    return refused is None or not refused(dtype)


def matches(placement: Placement, name: str) -> bool:
    """Whether a placement is the reduction that a rule calls `name`; `*` is any named one."""
    if not isinstance(placement, Pending) or not placement.reduce_op:
        return False
    return name == "*" or placement.reduce_op == _NAMES.get(name, name)
