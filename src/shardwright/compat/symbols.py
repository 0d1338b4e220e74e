"""Sizes that are symbols of a graph, and the numbers of the example that it is made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def has_symbols(sizes: Sequence[Any]) -> bool:
    """Is one of them a symbol of a graph?"""
    return any(isinstance(size, torch.SymInt) for size in sizes)


def at(size: Any, number: Callable[[str], int]) -> int:
    """The size where each symbol is the number that its name is given."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression.xreplace({symbol: number(str(symbol)) for symbol in expression.free_symbols}))


def has_example(size: Any) -> bool:
    """Is there a number that stands for it? Not where a dim was marked as unbacked, or data decide."""
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


def hint(size: Any) -> int:
    """The number of the example, on which nothing is said to depend; of a symbol that has none, an error."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return int(size) if known is None else int(known)
    return int(size)


def hints(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Those of several."""
    return tuple(map(hint, sizes))
