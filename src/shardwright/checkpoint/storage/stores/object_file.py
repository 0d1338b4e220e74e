"""One object of object storage: read in ranges, or written as a stream."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardwright.errors import words_of

_RANGE = 8 << 20  # of one request; several are under way at once where the storage can do that
_WINDOW = 32 << 20


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Storages raise what they like; from here on it is an OSError, which every caller expects."""
    try:
        yield
    except (OSError, EOFError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, words_of(error).partition("\n")[0]) from error


class ObjectFile:
    """An object, read in ranges."""

    step = _WINDOW

    def __init__(self, system: Any, path: str, size: int) -> None:
        self._system, self._path, self.size = system, path, size

    def read_into(self, pieces: Sequence[memoryview], at: int) -> None:
        """As `OpenFile` says: requests of 8 MiB, as many at once as 32 MiB have."""
        end = at + sum(map(len, pieces))
        if end > self.size:
            raise EOFError(f"the file ends before byte {self.size}")
        into = _Filling(pieces)
        for low in range(at, end, _WINDOW):
            starts = list(range(low, min(low + _WINDOW, end), _RANGE))
            ends = [min(start + _RANGE, end) for start in starts]
            with told():
                found = self._system.cat_ranges([self._path] * len(starts), starts, ends, on_error="raise")
            for start, stop, data in zip(starts, ends, found, strict=True):
                if len(data) != stop - start:
                    raise EOFError(f"the file ends before byte {start + len(data)}")
                into.take(memoryview(data))

    def keep(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `OpenFile` says: nothing."""

    def hold(self, at: int, nbytes: int) -> None:
        """As `OpenFile` says: nothing."""

    def is_whole(self) -> bool:
        """As `OpenFile` says; nothing of it is held."""
        return True

    def close(self) -> None:
        """As `OpenFile` says."""


class _Filling:
    """Pieces of memory that are filled one after another."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._left = [piece for piece in pieces if len(piece)]

    def take(self, data: memoryview) -> None:
        while len(data):
            first = self._left[0]
            count = min(len(first), len(data))
            first[:count], data = data[:count], data[count:]
            if count == len(first):
                self._left.pop(0)
            else:
                self._left[0] = first[count:]


class NewObject:
    """An object that is there when it is finished."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, pieces: Sequence[memoryview]) -> None:
        """As `NewFile` says."""
        with told():
            for piece in pieces:
                _write_all(self._stream, piece)

    def finish(self) -> None:
        """As `NewFile` says: what the storage has taken stays."""
        with told():
            self._stream.close()

    def give_up(self) -> None:
        """As `NewFile` says."""
        with contextlib.suppress(Exception):
            discard = getattr(self._stream, "discard", None)
            if discard is not None and not getattr(self._stream, "autocommit", False):
                discard()
        with contextlib.suppress(Exception):
            self._stream.close()


def _write_all(stream: Any, piece: memoryview) -> None:
    while len(piece):
        count = stream.write(piece)
        piece = piece[len(piece) if count is None else count :]
