"""Calls whose numbers decide nothing: told apart by the class of a number, so that a new one is no new call.

An optimizer hands over other numbers at every step (corrections of its bias, a learning rate): keyed by
their values, no step would be a known call. A key by classes holds for all of them, or says that values
decide (of a pending value: a factor below 0 makes a largest value the least); these are then appended.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from shardwright.remember import memo, remembered
from shardwright.tensor.dispatch.other_sizes import NUMBERS, computed_with, numbers_decide

Key = tuple[Any, ...]
# Ops (as what they call), and functions of torch, whose calls are keyed by classes of numbers.
ops: set[Any] = memo("ops of any number", set())
functions: set[Any] = memo("functions of any number", set())


@remembered(4096)
def only_computes(func: torch._ops.OpOverload) -> bool:
    """Is every number that the op takes only computed with?"""
    settings = (str(a.type) for a in func._schema.arguments if a.name not in computed_with(func))
    numbers = ("int", "float", "bool", "number")
    return bool(computed_with(func)) and not any(name in kind for kind in settings for name in numbers)


def split(key: Sequence[Any]) -> tuple[Key, Key]:
    """The key with classes alone in place of numbers, and the numbers. Each stands behind its class."""
    of_all: list[Any] = []
    numbers: list[Any] = []
    parts = iter(key)
    for part in parts:
        of_all.append(part)
        if part.__class__ is type and part in NUMBERS:
            numbers.append(next(parts))
    return tuple(of_all), tuple(numbers)


def put(table: MutableMapping[Key, Any], key: Key, found: Any, *, holds_for_all: bool) -> None:
    """Keep what is known of a call: for all numbers where it holds for them, and they do not decide."""
    of_all, numbers = split(key)
    if holds_for_all and not numbers_decide(of_all):
        table[of_all] = found
    else:
        table[of_all], table[*of_all, *numbers] = None, found


def find(table: Mapping[Key, Any], key: Key) -> Any:
    """What is known of a call whose first part, an op or a function, is one of any number; None: nothing."""
    of_all, numbers = split(key)
    found = table.get(of_all)
    return table.get((*of_all, *numbers)) if found is None else found
