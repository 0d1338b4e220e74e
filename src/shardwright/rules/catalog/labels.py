"""Small words for rules that write their notation from a call's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def letters(count: int, prefix: str = "a") -> list[str]:
    """`a0 a1 ...`: one label per dim."""
    return [f"{prefix}{i}" for i in range(count)]


def join(operands: Iterable[Sequence[str]], results: Iterable[Sequence[str]]) -> str:
    """The text of a rule from the items of its tensors."""
    left = ", ".join(" ".join(items) or "()" for items in operands)
    right = ", ".join(" ".join(items) or "()" for items in results)
    return f"{left} -> {right}"
