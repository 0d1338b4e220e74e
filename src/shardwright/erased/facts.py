"""A place that the program reaches, and what stood there."""

from __future__ import annotations

from dataclasses import dataclass
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


def content(holder: Any) -> Any:
    """What an array or a set holds, to be compared."""
    if isinstance(holder, set | frozenset):
        return {(type(x), x) for x in holder}
    return holder.shape, holder.dtype.str, holder.tobytes()
