"""Numbers that torch's optimizers read from their step counts, followed through the arithmetic on them.

`1 - beta ** step.item()` is another number at each step, computed on the host. A replay computes it again,
in the same double precision: the program holds the arithmetic as text. Only torch's own optimizers are
followed so: a program that asks for a number may print it, compare it, keep it, and gets the number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from shardwright.erased.tape import Number


class _Symbolic:
    """What torch asks of the node of any symbolic number."""

    def is_symbolic(self) -> bool:
        return True

    def is_int(self) -> bool:
        return False

    is_float = is_bool = is_nested_int = is_constant = is_int


class HostNumber(_Symbolic):
    """The node of a `torch.SymFloat`: a value, and the text that makes it again.

    used: told what was done with the number that no text can repeat (a comparison, a cast).
    handed: asked first where the number is cast: does an operator get it that is known?
    """

    def __init__(
        self, value: float, text: str, used: Callable[[str], None], handed: Callable[[], bool] | None = None
    ) -> None:
        self.value, self.text, self.used, self.handed = value, text, used, handed

    def is_float(self) -> bool:  # noqa: D102
        return True

    def has_hint(self) -> bool:  # noqa: D102
        return True

    def wrap_float(self, value: float) -> HostNumber:  # noqa: D102
        return HostNumber(value, repr(value), self.used)

    def wrap_int(self, value: int) -> HostNumber:  # noqa: D102
        return HostNumber(value, repr(value), self.used)

    def guard_float(self, _file: str, _line: int) -> float:  # noqa: D102
        if self.handed is None or not self.handed():
            self.used("the host reads it as a number")
        return self.value

    def _graph_repr(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> Any:
        if name in _TWO:
            return lambda other: self._two(name, other)
        if name in _COMPARED:
            return lambda other: _Truth(_COMPARED[name](self.value, other.value), self.used)
        if name == "str":
            return self._written
        if name == "neg":
            return lambda: HostNumber(-self.value, f"(-{self.text})", self.used)
        raise AttributeError(name)

    def _written(self) -> str:
        self.used("it is written as text")
        return repr(self.value)

    def _two(self, name: str, other: HostNumber) -> HostNumber:
        sign, compute = _TWO[name]
        return HostNumber(compute(self.value, other.value), f"({self.text} {sign} {other.text})", self.used)


class _Truth(_Symbolic):
    """The node of a comparison. torch's own checks (`expect_true`) are made by the replay's operators too."""

    def __init__(self, value: bool, used: Callable[[str], None]) -> None:
        self.value, self.used = value, used

    def is_bool(self) -> bool:
        return True

    def guard_bool(self, _file: str, _line: int) -> bool:
        self.used("the host decides by it")
        return self.value

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    def expect_true(self, _file: str, _line: int) -> bool:
        return self.value

    def _graph_repr(self) -> str:
        return str(self.value)


_TWO: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("+", operator.add),
    "sub": ("-", operator.sub),
    "mul": ("*", operator.mul),
    "float_truediv": ("/", operator.truediv),
    "float_pow": ("**", operator.pow),
    "truediv": ("/", operator.truediv),
    "pow": ("**", operator.pow),
}
_COMPARED = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def followed(
    value: float, name: str, used: Callable[[str], None], handed: Callable[[], bool] | None = None
) -> Any:
    """A number that is followed under this name."""
    node: Any = HostNumber(value, name, used, handed)
    return torch.SymFloat(node)


def is_followed(value: Any) -> bool:
    """Is it a number that is followed?"""
    return isinstance(value, torch.SymFloat) and isinstance(value.node, HostNumber)


def plain(value: Any) -> Any:
    """The number itself."""
    return value.node.value if is_followed(value) else value


def text_of(value: Any) -> Number:
    """What makes it again."""
    return Number(value.node.text)
