"""What the program asked of attention over a cut sequence, for a part of the program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardwright.tensor.attention.choice import AUTO


@dataclass(frozen=True, slots=True)
class Asked:
    """way: one of `choice.WAYS`. stated: the program asked for attention over a cut sequence, in words.

    blocking: messages of a ring are waited for before anything is computed; to measure what overlap is worth.
    """

    way: str = AUTO
    stated: bool = False
    blocking: bool = False


class _Stack(threading.local):
    asked: tuple[tuple[object, Asked], ...] = ()


_stack = _Stack()


def asked_here() -> Asked:
    """What the innermost block of this thread asks for."""
    return _stack.asked[-1][1] if _stack.asked else Asked()


def begin(asked: Asked, owner: object) -> None:
    """Open a block; for hooks, which cannot use `with`."""
    _stack.asked = (*_stack.asked, (owner, asked))


def end(owner: object) -> bool:
    """Close the innermost block, if it is this owner's: an error may come before it opens one."""
    if not (_stack.asked and _stack.asked[-1][0] is owner):
        return False
    _stack.asked = _stack.asked[:-1]
    return True


@contextmanager
def attention_by(way: str, *, blocking: bool = False) -> Iterator[None]:
    """Within the block (of this thread) attention over a cut sequence goes this way."""
    owner = object()
    begin(Asked(way, stated=True, blocking=blocking), owner)
    try:
        yield
    finally:
        end(owner)
