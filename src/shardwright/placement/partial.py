"""`Partial(reduce_op)`: the value is a named reduction of what the coords hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial as TorchPartial

from shardwright.errors import PlacementError
from shardwright.placement.base import Pending, Placement, _rebuild


@dataclass(frozen=True)
class Reduction:
    """One reduction: how it combines two or all locals, what it ignores, for which values its law holds."""

    combine: _Fold
    identity: int | None  # None: every coord holds the value
    in_domain: Callable[[Tensor], bool]
    linear: bool = False
    tolerance: int = 0


class _Fold:
    """Combine first to last with one operation of two; floats under 32 bits, and complex halves, wider."""

    def __init__(self, op: Callable[..., Tensor], *, mean: bool = False) -> None:
        self.op, self.mean = op, mean

    def __call__(self, parts: Sequence[Tensor], free: Sequence[bool]) -> Tensor:
        """One tensor: a free part, or a new one."""
        total = self._first(parts, free)
        for part in map(_addable, parts[2:]):
            total = self.op(total, part) if total.requires_grad else self.op(total, part, out=total)
        if self.mean and len(parts) > 1:
            total = total / len(parts) if total.requires_grad else total.div_(len(parts))
        return total.to(parts[0].dtype)

    def _first(self, parts: Sequence[Tensor], free: Sequence[bool]) -> Tensor:
        """The first two together."""
        if len(parts) == 1:
            return parts[0] if free[0] else parts[0].clone()
        one, two = parts[:2]
        if (wider := _WIDER.get(one.dtype)) is not None:
            return self.op(one.to(wider), _addable(two))
        if not (free[0] or free[1]):
            return self.op(one, two)
        return self.op(one, two, out=one if free[0] else two)


_DTYPES = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]
_WIDER = {x: torch.float32 for x in _DTYPES if x.is_floating_point and x.itemsize < torch.float32.itemsize}
_WIDER[torch.complex32] = torch.complex64


def _addable(x: Tensor) -> Tensor:
    """8-bit floats have no arithmetic, not even with float32; the half types have."""
    return x.float() if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _is_number(x: Tensor) -> bool:
    return x.dtype != torch.bool


def _is_ordered(x: Tensor) -> bool:
    return not x.is_complex()


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_integral(x: Tensor) -> bool:
    return not _is_float(x)


def _length(one: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The length of two terms; beside a term of 0 the other one as it is, for a value has a sign.

    What is no number stays none beside infinity, which `hypot` takes.
    """
    sign = torch.where((one == 0) | (other == 0), one + other, 1)
    one, other = torch.where(other.isnan(), other, one), torch.where(one.isnan(), one, other)
    return torch.copysign(torch.hypot(one, other, out=out), sign, out=out)


_DOMAINS = (
    "sum and product are not for bool, max and min not for complex, avg and norm2 are for floating "
    "point (norm2 not for complex), band, bor and bxor for integers and bool"
)
_REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_Fold(torch.add), 0, _is_number, linear=True),
    "avg": Reduction(_Fold(torch.add, mean=True), None, _is_float, linear=True, tolerance=2),
    "max": Reduction(_Fold(torch.maximum), None, _is_ordered),
    "min": Reduction(_Fold(torch.minimum), None, _is_ordered),
    "product": Reduction(_Fold(torch.mul), 1, _is_number),
    "norm2": Reduction(_Fold(_length), 0, torch.is_floating_point),
    "band": Reduction(_Fold(torch.bitwise_and), None, _is_integral),
    "bor": Reduction(_Fold(torch.bitwise_or), 0, _is_integral),
    "bxor": Reduction(_Fold(torch.bitwise_xor), 0, _is_integral),
}


class Partial(TorchPartial, Pending):
    """The value is the sum (avg, max, min, product, norm2, band, bor, bxor) of what the coords hold.

    `embed` puts the value on coord 0 and the identity elsewhere, or on every coord where the reduction is
    idempotent or an average: exact, except avg (2 units in the last place).
    Domain: sum and product not on bool, max and min not on complex, avg on floating point, norm2 on real
    floating point, the bitwise ones on integers and bool.
    norm2: the length of the terms. Where all but one are 0 it is that one, with its sign: terms of a length
    are not negative, and a negative number that is written into one in place has a term of its own.
    Equal to, hashed like, and an instance of torch's `Partial`.
    Args: reduce_op: one of these names.
    Raises: PlacementError: another one.
    """

    any_size = True

    def __init__(self, reduce_op: str = "sum") -> None:
        named: Any = reduce_op
        if not isinstance(named, str) or named not in _REDUCTIONS:
            raise PlacementError(
                f"Partial({reduce_op!r}): the reductions are {', '.join(_REDUCTIONS)}; "
                "another one is a subclass of Pending with combine and embed"
            )
        TorchPartial.__init__(self, reduce_op)

    @property
    def _reduction(self) -> Reduction:
        return _REDUCTIONS[self.reduce_op]

    @property
    def linear(self) -> bool:
        """Sum and avg."""
        return self._reduction.linear

    @property
    def tolerance(self) -> int:
        """0, or 2 for avg."""
        return self._reduction.tolerance

    def combine(self, locals: Sequence[Tensor]) -> Tensor:  # noqa: A002 - the word of the laws
        """The reduction over all coords, in coord order, in the dtype of the locals."""
        return self._reduction.combine(locals, [False] * len(locals))

    def combine_in_place(self, locals: Sequence[Tensor], free: Sequence[bool]) -> Tensor:  # noqa: A002
        """As `combine`, without a new tensor where the first or the second local is free."""
        return self._reduction.combine(locals, free)

    def embed(self, x: Tensor, n: int, coord: int) -> Tensor:  # noqa: ARG002 - no reduction here depends on n
        """`x`, or the identity on coords other than 0."""
        self._check(x)
        value = self._reduction.identity
        return x.clone() if coord == 0 or value is None else torch.full_like(x, value)

    def identity(self, x: Tensor) -> Tensor:
        """What an empty coord contributes: 0, 1, or the end of the dtype's range."""
        value = self._reduction.identity
        return torch.full_like(x, _neutral(self.reduce_op, x.dtype) if value is None else value)

    def in_domain(self, x: Tensor) -> bool:
        """Whether the reduction has a meaning for this value."""
        return self._reduction.in_domain(x)

    def _check(self, x: Tensor) -> None:
        if not self._reduction.in_domain(x):
            raise PlacementError(
                f"{self.text()} has no meaning for these values of {x.dtype}; {_DOMAINS}; redistribute a "
                "tensor to Replicate() before they are written into it"
            )

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return f"Partial({self.reduce_op})"

    def __eq__(self, other: object) -> bool:
        """Equal to a `Partial` with the same reduction, torch's included; a subclass may mean another."""
        kind = type(other)
        if kind is not type(self) and (kind is not TorchPartial or type(self) is not Partial):
            return False
        if self.reduce_op != other.reduce_op:  # type: ignore[attr-defined]
            return False
        return type(self) is Partial or bool(self._state() == other._state())  # type: ignore[attr-defined]

    __hash__ = TorchPartial.__hash__
    __repr__ = TorchPartial.__repr__
    __str__ = TorchPartial.__str__

    def _restore(self, state: dict[str, Any]) -> None:
        """The reduce_op is torch's attribute, the others are those that a subclass adds."""
        TorchPartial.__init__(self, state["reduce_op"])
        super()._restore({name: value for name, value in state.items() if name != "reduce_op"})

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """torch's own text of this class; of a subclass, what makes it again."""
        if type(self) is Partial:
            made: tuple[str, dict[str, Any]] = super().__fx_repr__()  # type: ignore[no-untyped-call]
            return made
        return Placement.__fx_repr__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self) is Partial:
            return type(self), (self.reduce_op,)
        return _rebuild, (type(self), {"reduce_op": self.reduce_op, **self._state()})


def is_reduction(name: object) -> bool:
    """May a `Partial` have it?"""
    return isinstance(name, str) and name in _REDUCTIONS


def _neutral(reduce_op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that max, min, band ignore; an average has none, its empty coords count as 0."""
    if reduce_op == "avg":
        return 0
    if reduce_op == "band":
        return True if dtype == torch.bool else -1
    low = reduce_op == "max"
    if dtype == torch.bool:
        return not low
    if dtype.is_floating_point:
        return -float("inf") if low else float("inf")
    return torch.iinfo(dtype).min if low else torch.iinfo(dtype).max
