"""The reductions that rules name, as pending placements."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwright.errors import RuleError
from shardwright.placement.base import Pending, Placement
from shardwright.placement.partial import Partial
from shardwright.remember import remembered

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
# Facts of more than one reduction: what comes out is reduced as what went in.
KEPT = frozenset({"*", "each"})
_PLACEMENTS: dict[str, Pending] = {name: Partial(op) for name, op in _NAMES.items()}


def pending_of(name: str) -> Pending:
    """The pending placement of a reduction by its name in rules. Raises: RuleError: there is none."""
    try:
        return _PLACEMENTS[name]
    except KeyError:
        raise RuleError(f"unknown reduction {name!r}; rules may use {', '.join(_NAMES)}") from None


@remembered(1024)
def has_meaning(placement: Pending, dtype: torch.dtype) -> bool:
    """Whether values of this dtype can be reduced so: no sum of bools, no average of integers."""
    return placement.in_domain(torch.zeros((), dtype=dtype, device="cpu"))


@remembered(1024)
def holds_any(placement: Pending, dtype: torch.dtype) -> bool:
    """Whether terms can be made of every finished value of this dtype: a length is of no negative number."""
    blank = torch.ones((), dtype=dtype, device="cpu")
    return placement.in_domain(blank) and (not dtype.is_floating_point or placement.in_domain(-blank))


@remembered(1024)
def converts(placement: Pending, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the parts may be converted in place of the value: `to(combine(parts)) == combine(to(parts))`.

    One device has the value in `source`: a sum of half types is rounded there, one of integers wraps around.
    A sum of wider parts would not.
    """
    known = _CONVERSIONS.get(placement.reduce_op)
    return source == target or (known is not None and known(source, target))


@remembered(1024)
def stays_neutral(placement: Pending, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether what combines with nothing in `source` does so in `target`: an infinity is no integer."""
    return placement.reduce_op not in {"max", "min"} or converts(placement, source, target)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _both_integers(source: torch.dtype, target: torch.dtype) -> bool:
    return _is_integer(source) and _is_integer(target)


def _drops_high_bits(source: torch.dtype, target: torch.dtype) -> bool:
    """Integers modulo a power of two, taken modulo a smaller one."""
    return _both_integers(source, target) and target.itemsize <= source.itemsize


def _same_precision(source: torch.dtype, target: torch.dtype) -> bool:
    """Real and complex numbers that are rounded alike."""
    inexact = all(dtype.is_floating_point or dtype.is_complex for dtype in (source, target))
    return inexact and source.to_real() == target.to_real()


def _is_additive(source: torch.dtype, target: torch.dtype) -> bool:
    return _drops_high_bits(source, target) or _same_precision(source, target)


def _is_multiplicative(source: torch.dtype, target: torch.dtype) -> bool:
    return _is_additive(source, target) and not (source.is_complex and not target.is_complex)


def _keeps_order(source: torch.dtype, target: torch.dtype) -> bool:
    """From real numbers to some that hold them all, if rounded."""
    if source.is_complex or target.is_complex or target == torch.bool:
        return False
    if source == torch.bool or target.is_floating_point:
        return True
    if source.is_floating_point:
        return False
    outer, inner = torch.iinfo(target), torch.iinfo(source)
    return outer.max >= inner.max and outer.min <= inner.min


_CONVERSIONS: dict[str, Callable[[torch.dtype, torch.dtype], bool]] = {
    "sum": _is_additive,
    "avg": _same_precision,
    "product": _is_multiplicative,
    "max": _keeps_order,
    "min": _keeps_order,
    "band": _both_integers,
    "bor": _both_integers,
    "bxor": _both_integers,
}


def matches(placement: Placement, name: str) -> bool:
    """Whether a placement is the reduction that a rule calls `name`; `*` is any named one, `each` any at all.

    Of one without a name nothing is known, not what zeros combine to: only copies are true of it.
    """
    if not isinstance(placement, Pending) or not (placement.reduce_op or name == "each"):
        return False
    return name in KEPT or placement.reduce_op == _NAMES.get(name, name)
