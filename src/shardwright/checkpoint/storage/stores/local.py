"""A folder of a file system: a rename is the commit, a lock of the system keeps others out."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.pages import Pages
from shardwright.errors import CheckpointError

_BEHIND = 2 << 20  # bytes that the disk has not been told of, at most


class _Open:
    """What is open; it is closed at the latest when nobody has it.

    An interrupt may come when the system has opened it and nobody knows of it yet. Closed, not unlocked: a
    child of this process, which has a copy, would take the lock of its parent.
    """

    _handle = -1

    def close(self) -> None:
        """As `OpenFile` says."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __del__(self) -> None:
        """Close it."""
        self.close()


class LocalFile(_Open):
    """A regular file, open to be read."""

    step = 1 << 20  # stays in the processor's cache between read and checksum

    def __init__(self, path: Path, *, links: bool) -> None:
        self._handle = disk.open_regular(path, links=links)
        self.size = os.fstat(self._handle).st_size
        self._pages: Pages | None = None

    def read_into(self, pieces: Sequence[memoryview], at: int) -> None:
        """As `OpenFile` says."""
        disk.read_into(self._handle, pieces, at)

    def keep(self, ranges: Iterable[tuple[int, int]]) -> None:
        """As `OpenFile` says."""
        with contextlib.suppress(OSError, ValueError):
            self._pages = Pages(self._handle, self.size)
            self._pages.keep(ranges)

    def hold(self, at: int, nbytes: int) -> memoryview | None:
        """As `OpenFile` says."""
        return None if self._pages is None else self._pages.hold(at, nbytes)

    def is_whole(self) -> bool:
        """As `OpenFile` says."""
        return os.fstat(self._handle).st_size == self.size

    def close(self) -> None:
        """As `OpenFile` says."""
        self._pages = None
        super().close()


class NewLocalFile(_Open):
    """A file under a name that nobody had."""

    def __init__(self, path: Path) -> None:
        self._handle, self._begun = disk.open_new(path), 0

    def write(self, pieces: Sequence[memoryview]) -> None:
        """As `NewFile` says; the disk begins while more is made."""
        disk.write_all(self._handle, pieces)
        self._begun += sum(map(len, pieces))
        if self._begun >= _BEHIND:
            disk.start_writing(self._handle)
            self._begun = 0

    def finish(self) -> None:
        """As `NewFile` says: `fsync`."""
        try:
            os.fsync(self._handle)
        finally:
            self.close()

    def give_up(self) -> None:
        """As `NewFile` says."""
        self.close()


class LocalHold(_Open):
    """A locked folder."""

    def __init__(self, path: Path, handle: int, *, alone: bool, made: bool) -> None:
        self._path, self._handle, self._made, self.alone = path, handle, made, alone

    def settle(self) -> None:
        """As `Hold` says."""
        if self._made:
            disk.sync_folder(self._path.parent)

    def check(self) -> None:
        """As `Hold` says."""
        if not disk.is_at(self._handle, self._path):
            raise CheckpointError(f"{self._path} was moved or removed while it was written")

    def let_go(self, *, drop: bool = False) -> None:
        """As `Hold` says."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            if drop and self._made:
                with contextlib.suppress(OSError):
                    self._path.rmdir()
            disk.unlock_folder(handle)


class LocalStore:
    """The files of a folder. No link is followed."""

    renames = True

    def __init__(self, place: Path) -> None:
        self.place = place

    def exists(self) -> bool:
        """As `Store` says."""
        return self.place.is_dir()

    def is_link(self) -> bool:
        """As `Store` says."""
        return self.place.is_symlink()

    def names(self) -> list[str]:
        """As `Store` says."""
        return sorted(one.name for one in self.place.iterdir())

    def folders(self) -> list[str]:
        """As `Store` says; links to folders too."""
        return sorted(one.name for one in self.place.iterdir() if one.is_dir())

    def has(self, name: str) -> bool:
        """As `Store` says, a broken link included."""
        path = self.place / name
        return path.is_symlink() or path.exists()

    def size(self, name: str) -> int | None:
        """As `Store` says."""
        return disk.size_of(self.place / name)

    def read(self, name: str, most: int) -> bytes:
        """As `Store` says."""
        return disk.read_small(self.place / name, most)

    def write(self, name: str, data: bytes) -> None:
        """As `Store` says."""
        disk.write_small(self.place / name, data)

    def create(self, name: str) -> NewLocalFile:
        """As `Store` says."""
        return NewLocalFile(self.place / name)

    def open(self, name: str, *, links: bool = False) -> LocalFile:
        """As `Store` says."""
        return LocalFile(self.place / name, links=links)

    def remove(self, name: str) -> None:
        """As `Store` says."""
        with contextlib.suppress(FileNotFoundError):
            (self.place / name).unlink()

    def rename(self, name: str, to: str) -> None:
        """As `Store` says, in one instant."""
        (self.place / name).rename(self.place / to)

    def sync(self) -> None:
        """As `Store` says."""
        disk.sync_folder(self.place)

    def hold(self) -> LocalHold:
        """As `Store` says."""
        made = False
        for _ in range(100):  # another save that gave up may remove the folder that it made
            made = make_folder(self.place) or made
            try:
                handle, alone = lock_or_warn(self.place)
            except FileNotFoundError:
                continue
            hold = LocalHold(self.place, handle, alone=alone, made=made)
            try:
                hold.check()
            except CheckpointError:
                hold.let_go()
            except BaseException:  # Ctrl-C
                hold.let_go()
                raise
            else:
                return hold
        raise CheckpointError(f"{self.place} is made and removed again by somebody else: name another folder")

    def hold_there(self) -> LocalHold:
        """As `Store` says."""
        handle, alone = lock_or_warn(self.place)
        return LocalHold(self.place, handle, alone=alone, made=False)

    def drop_empty(self) -> None:
        """As `Store` says; what is not ours keeps it there."""
        with contextlib.suppress(OSError):
            self.place.rmdir()


def make_folder(path: Path) -> bool:
    """Make a folder and those above it; False: it is there, or was a moment ago.

    Raises: CheckpointError: something else is there, or the disk refuses.
    """
    try:
        path.mkdir(parents=True)
    except OSError as error:
        there = next((one for one in (path, *path.parents) if os.path.lexists(one)), path)
        if there.is_dir() and isinstance(error, FileExistsError):
            return False
        link = "a link to what is not there" if there.is_symlink() and not there.exists() else "no folder"
        why = f"{error.strerror}" if there.is_dir() else f"{there} is {link}"
        raise CheckpointError(f"nothing can be written to {path}: {why}; name another folder") from None
    return True


def lock_or_warn(path: Path) -> tuple[int, bool]:
    """The folder's lock, and True; where the file system has no locks the folder, False, and a warning.

    Raises: CheckpointError: another process holds the lock.
    """
    try:
        return lock(path), True
    except disk.NoLocksError as error:
        warnings.warn(
            f"{error.strerror}: two saves to {path} at once are not noticed, and what interrupted saves left "
            "there is kept",
            stacklevel=2,
        )
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), False


def lock(path: Path) -> int:
    """The folder's lock. Raises: CheckpointError: somebody holds it. NoLocksError: there is none to have."""
    handle = disk.lock_folder(path)
    if handle is None:
        raise CheckpointError(
            f"{path} is being written by another process (or another save of this one): wait for it, or name "
            "another folder"
        )
    return handle
