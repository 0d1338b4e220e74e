"""Parts of a file that the system is told to keep in memory until they are let go.

What was checked there needs no second place in memory: the copy of it comes later, without another word with
the disk. Memory that is new costs more than reading what is in the cache of the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from shardwright.checkpoint.storage.extension import extension
from shardwright.remember import remembered

_AT_ONCE = 8 << 20  # bytes, a few large pages: a user who may keep little keeps some of it


class Pages:
    """A file, mapped to be read; it stays so as long as a part that `hold` gave is in use."""

    def __init__(self, handle: int, size: int) -> None:
        """Map it. Raises: OSError, ValueError: the file system cannot do that, or the file is shorter."""
        file = mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            file.madvise(mmap.MADV_SEQUENTIAL)  # what is not in memory comes in large reads
        self._data = np.frombuffer(file, dtype=np.uint8)
        self._kept: list[tuple[int, int]] = []

    def keep(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have the bytes of these ranges in memory, and kept there, as far as the system does that for us.

        It may not read them, too: whoever then reads in the usual way hears why. So what is held does not
        ask the disk for anything, and only a file that is cut short takes it away (`unless_cut_short`).
        Neighbours are one range, cut between large pages: one that begins or ends within a large page would
        have this taken for 512 small ones.
        """
        lock, address = _mlock(), self._data.ctypes.data
        if lock is None or _cut_short() is None:
            return
        for low, high in _joined(ranges):
            self._kept.append((low, low))
            for at in (low, *range((low // _AT_ONCE + 1) * _AT_ONCE, high, _AT_ONCE)):
                first, last = at // mmap.PAGESIZE * mmap.PAGESIZE, min((at // _AT_ONCE + 1) * _AT_ONCE, high)
                if lock(address + first, last - first):
                    return
                self._kept[-1] = low, last

    def hold(self, at: int, nbytes: int) -> memoryview | None:
        """These bytes, all in memory and kept there; None: they are not."""
        if not any(low <= at and at + nbytes <= high for low, high in self._kept):
            return None
        return self._data[at : at + nbytes].data


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that follow one another as one, in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


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
