"""What a cache of `functools` has answered: C holds it, and the collector of garbage shows it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from typing import Any

CACHE = type(functools.cache(lambda: None))


def answers_of(cache: Any) -> list[Any]:
    """The answers that it would give again, and, where it is bounded, the arguments that they belong to."""
    held = gc.get_referents(cache)
    behind = next(place for place, x in enumerate(held) if x is cache.__wrapped__)
    answers, table = held[: behind - 1], held[behind - 1]  # of one without a bound the table alone has them
    return [x for x in (*answers, *table.values()) if not isinstance(x, type)]


def remembers(cache: Any, answers: Sequence[Any]) -> bool:
    """Would it still give each of these?"""
    now = set(map(id, answers_of(cache)))
    return all(id(x) in now for x in answers)
