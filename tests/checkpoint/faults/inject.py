"""Disk errors on purpose: the n-th operation on files in a folder fails, once or from then on."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from shardwright.checkpoint.storage import disk

CHANGING = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "rmdir")
READING = ("open", "preadv", "stat", "listdir")


class Count:
    """How many operations there were, and the one that failed."""

    def __init__(self) -> None:
        self.done = 0
        self.failed = ""


@contextlib.contextmanager
def failing(
    folder: Path, at: int, code: int, *, names: tuple[str, ...] = CHANGING, lasting: bool = False
) -> Iterator[Count]:
    """Operation number `at` (from 1) on what is in the folder raises OSError(code); 0: none, only counted.

    Args: code: 0: it is Ctrl-C instead. lasting: all later ones fail too, as on a disk that is gone.
    """
    count = Count()
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}
    opened: set[int] = set()

    def ours(where: Any) -> bool:
        if isinstance(where, int):
            return where in opened
        return isinstance(where, str | os.PathLike) and str(folder) in os.fspath(where)

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not ours(args[0]):
                return real[name](*args, **kwargs)
            count.done += 1
            if at and (count.done == at or (lasting and count.done > at)):
                count.failed = count.failed or name
                raise OSError(code, os.strerror(code), str(args[0])) if code else KeyboardInterrupt
            result = real[name](*args, **kwargs)
            if name == "open":
                opened.add(result)
            return result

        return call

    for name in names:
        setattr(os, name, stand_in(name))
    try:
        yield count
    finally:
        for name, function in real.items():
            setattr(os, name, function)


CODES = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}


def no_locks(path: Path) -> NoReturn:
    """In place of `disk.lock_folder`: a file system without `flock`."""
    raise disk.NoLocksError(errno.EOPNOTSUPP, "this file system has no locks (flock)", str(path))
