"""A place that the program reaches, and what stood there."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

FLOAT = "float"  # a kind


@dataclass(frozen=True, slots=True)
class Fact:
    """What stood at a place. read(holder, key) looks again.

    kind: "item" of a dict or list, "cell" of a closure, "attribute", "length" of a container, "keys" of a
        dict in order, "answers" of a cache, "alive" for a weak reference, "members" of a class, "unset" for
        a slot and "absent" for a global, "content" of an array or set, "float" of a dict that holds any
        number there, "context" for its variable.
    """

    path: str
    kind: str
    holder: Any
    key: Any
    value: Any


_BUILT_IN = (OrderedDict, dict, list, tuple, deque, set, frozenset)
_ASKED = ("__getitem__", "__iter__", "__len__")


def is_built_in(holder: Any) -> bool:
    """Is it a container of Python's own, or of a class on top of one?"""
    return isinstance(holder, _BUILT_IN)


def answers_itself(holder: Any) -> bool:
    """Would code of Python answer what it holds? That may load something, count, or make what it gives."""
    return any(isinstance(getattr(type(holder), name, None), FunctionType) for name in _ASKED)


def _of_c(holder: Any) -> Any:
    """The class that is asked what it holds, where its own may have an answer of its own."""
    return next((cls for cls in _BUILT_IN if isinstance(holder, cls)), type(holder))


def item_of(holder: Any, key: Any) -> Any:
    """What stands there; None where a dict has no such key, which none gets by being asked."""
    return dict.get(holder, key) if isinstance(holder, dict) else _of_c(holder).__getitem__(holder, key)


def each_of(holder: Any) -> Iterator[Any]:
    """The keys of a dict, the things in anything else."""
    found: Iterator[Any] = _of_c(holder).__iter__(holder)
    return found


def length_of(holder: Any) -> int:
    """How many there are."""
    found: int = _of_c(holder).__len__(holder)
    return found


def content(holder: Any) -> Any:
    """What an array or a set holds, to be compared."""
    if isinstance(holder, set | frozenset):
        return {(type(x), x) for x in each_of(holder)}
    return holder.shape, holder.dtype.str, holder.tobytes()
