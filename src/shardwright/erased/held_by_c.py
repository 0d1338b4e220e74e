"""What only C holds: the answers of a cache of `functools`, and what a weak reference refers to."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Sequence
from typing import Any

CACHE = type(functools.cache(lambda: None))


def answers_of(cache: Any) -> list[Any]:
    """The answers that it would give again, and, where it is bounded, the arguments that they belong to.

    The collector of garbage shows them.
    """
    held = gc.get_referents(cache)
    behind = next(place for place, x in enumerate(held) if x is cache.__wrapped__)
    answers, table = held[: behind - 1], held[behind - 1]  # of one without a bound the table alone has them
    return [x for x in (*answers, *table.values()) if not isinstance(x, type)]


def remembers(cache: Any, answers: Sequence[Any]) -> bool:
    """Would it still give each of these?"""
    now = set(map(id, answers_of(cache)))
    return all(id(x) in now for x in answers)


def is_weak(x: Any) -> bool:
    """Is it a weak reference, or a proxy, which says that it is what it refers to?"""
    return issubclass(type(x), weakref.ref) or type(x) in weakref.ProxyTypes


def referent_of(weak: Any) -> Any:
    """What it refers to, None where that is gone."""
    if issubclass(type(weak), weakref.ref):
        return weak()
    try:
        return weak.__init__.__self__
    except ReferenceError:
        return None


def is_alive(weak: Any) -> bool:
    """Is what it refers to still there?"""
    return referent_of(weak) is not None
