"""The file system, one call each: everything that a checkpoint does to a disk goes through here.

Folders are open while they are used and names are looked up in them, so no link leads out; regular files
only are read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwright.remember import remembered

_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF}
_WRITE_WITHOUT_WAITING = 2  # SYNC_FILE_RANGE_WRITE of <fcntl.h>
_MOST = 1 << 30  # of one call; the system takes a little less than 2 GiB


class NoLocksError(OSError):
    """The file system cannot lock a folder."""


def open_new(path: Path) -> int:
    """A new file to write. Raises: FileExistsError: the name is taken."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def open_regular(path: Path, *, links: bool = False) -> int:
    """A file to read.

    Raises: OSError: there is none, or a link (but with `links`), or it is no regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return handle


def size_of(path: Path) -> int | None:
    """Bytes in a regular file that is no link; None: there is no such file."""
    try:
        found = path.stat(follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def write_all(handle: int, pieces: Sequence[memoryview]) -> None:
    """Append the pieces (at most 1,024)."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        written = os.writev(handle, left)
        while written:
            if written < len(left[0]):
                left[0] = left[0][written:]
                break
            written -= len(left.pop(0))


def start_writing(handle: int) -> None:
    """Let the disk begin with what was appended, so that the `fsync` at the end finds little left to do.

    A hint: where the system has no such call (it is Linux's), nothing is different but the time.
    """
    call = _sync_file_range()
    if call is not None:
        call(handle, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_WRITE_WITHOUT_WAITING))


@remembered(1)
def _sync_file_range() -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    return found


def read_into(handle: int, pieces: Sequence[memoryview], at: int) -> None:
    """Fill the pieces (at most 1,024) with what stands from byte `at` on. Raises: EOFError: the file ends."""
    left = [piece for piece in pieces if len(piece)]
    while left:
        got = os.preadv(handle, left if len(left[0]) <= _MOST else [left[0][:_MOST]], at)
        if not got:
            raise EOFError(f"the file ends before byte {at}")
        at += got
        while got:
            if got < len(left[0]):
                left[0] = left[0][got:]
                break
            got -= len(left.pop(0))


def read_small(path: Path, most: int, *, links: bool = False) -> bytes:
    """A whole file. Raises: OSError: there is none, it is a link, or it has more than `most` bytes."""
    handle = open_regular(path, links=links)
    try:
        size = os.fstat(handle).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(path))
        data = bytearray(size)
        read_into(handle, [memoryview(data)], 0)
        return bytes(data)
    finally:
        os.close(handle)


def write_small(path: Path, data: bytes) -> None:
    """A new file that is on the disk when this returns."""
    handle = open_new(path)
    try:
        write_all(handle, [memoryview(data)])
        os.fsync(handle)
    except OSError as error:
        error.filename = str(path)  # the system says none of an open file
        raise
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_folder(path: Path) -> int | None:
    """An open folder that nobody else can lock until it is closed; None: somebody has it.

    The lock is the system's (`flock`): it ends with the process, however that ends.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException as error:  # Ctrl-C too: a lock that nobody knows of lasts as long as the process
        os.close(handle)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            raise NoLocksError(error.errno, "this file system has no locks (flock)", str(path)) from None
        raise
    return handle


def unlock_folder(handle: int) -> None:
    """Let a locked folder go, also where a child of this process has inherited the open folder."""
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file or folder is still the one at this path."""
    try:
        there = path.stat()
    except OSError:
        return False
    here = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
