"""A child process that knows what this one knows, and whose memories end with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVar

_Answer = TypeVar("_Answer")
_FORK = multiprocessing.get_context("fork")


def in_a_child(function: Callable[[], _Answer]) -> _Answer:
    """What the function returns in a fork of this process; it must pickle.

    Rejected: emptying the caches here, which would count as decided what a forgotten cache still knows.
    Raises: RuntimeError: the child ended without an answer; what it said is on the standard error.
    """
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=lambda: sender.send(function()))
    child.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        raise RuntimeError("a child ended without an answer") from None
    finally:
        receiver.close()
        child.join()
