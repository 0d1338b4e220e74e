"""Parts of a file that the system is told to keep in memory until they are let go.

What was checked there needs no second place in memory: the copy of it comes later, without another word with
the disk. Memory that is new costs more than reading what is in the cache of the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shardwright.checkpoint.storage.extension import extension
from shardwright.remember import remembered


class Pages:
    """A file, mapped to be read; it stays so as long as a part that `hold` gave is in use."""

    def __init__(self, handle: int, size: int) -> None:
        """Map it. Raises: OSError, ValueError: the file system cannot do that, or the file is shorter."""
        file = mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            file.madvise(mmap.MADV_SEQUENTIAL)  # what is not in memory comes in large reads
        self._data = np.frombuffer(file, dtype=np.uint8)

    def hold(self, at: int, nbytes: int) -> memoryview | None:
        """These bytes, all in memory and kept there; None: the system does not keep so much for us.

        It may not read them, too: whoever then reads in the usual way hears why. So what is held does not
        ask the disk for anything, and only a file that is cut short takes it away (`unless_cut_short`).
        """
        lock = _mlock()
        if lock is None or _cut_short() is None:
            return None
        address: int = self._data.ctypes.data
        first = at // mmap.PAGESIZE * mmap.PAGESIZE
        if lock(address + first, at + nbytes - first):
            return None
        return self._data[at : at + nbytes].data


@contextlib.contextmanager
def unless_cut_short(held: memoryview) -> Iterator[None]:
    """A block that looks at what is held. Raises: EOFError, at its end: the file was cut short."""
    guard = _cut_short()
    guard.watch(held)
    try:
        yield
    finally:
        if guard.unwatch():
            raise EOFError("the file became shorter while it was read")


@remembered(1)
def _cut_short() -> Any:
    """The extension without which such a file ends the process; None: it was not built."""
    return extension("cut_short")


@remembered(1)
def _mlock() -> Callable[[int, int], int] | None:
    try:
        found = ctypes.CDLL(None).mlock
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int
    call: Callable[[int, int], int] = found
    return call
