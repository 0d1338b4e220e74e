"""A folder of object storage, by way of fsspec: no rename, no lock, a request for each read.

Nothing that a listing said before is believed: what other ranks wrote must be seen.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Any

from shardwright.checkpoint.storage.place import Address
from shardwright.checkpoint.storage.stores.object_file import NewObject, ObjectFile, told
from shardwright.errors import CheckpointError


class NoHold:
    """Object storage keeps nobody out: names that no other save has, and journals, stand in for a lock."""

    alone = False

    def settle(self) -> None:
        """As `Hold` says: a prefix needs nothing."""

    def check(self) -> None:
        """As `Hold` says: a prefix is always there."""

    def let_go(self, *, drop: bool = False) -> None:
        """As `Hold` says."""


class ObjectStore:
    """The objects below an address."""

    renames = False

    def __init__(self, place: Address) -> None:
        self.place = place
        self._system, self._root = _open(place)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with told(), contextlib.suppress(FileNotFoundError):  # a prefix of nothing is not there
            self._system.invalidate_cache()
            found = self._system.ls(self._root, detail=True)
        return [one for one in found if one["name"].rstrip("/") != self._root]

    def _info(self, name: str) -> dict[str, Any] | None:
        with told():
            self._system.invalidate_cache()
            try:
                found: dict[str, Any] = self._system.info(self._at(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return found

    def exists(self) -> bool:
        """As `Store` says."""
        with told():
            self._system.invalidate_cache()
            return bool(self._system.isdir(self._root))

    def is_link(self) -> bool:
        """As `Store` says: there are none."""
        return False

    def names(self) -> list[str]:
        """As `Store` says; none where nothing is there."""
        return sorted(_last(one) for one in self._entries())

    def folders(self) -> list[str]:
        """As `Store` says."""
        return sorted(_last(one) for one in self._entries() if one["type"] == "directory")

    def has(self, name: str) -> bool:
        """As `Store` says."""
        return self._info(name) is not None

    def size(self, name: str) -> int | None:
        """As `Store` says."""
        found = self._info(name)
        return found["size"] if found is not None and _is_regular(found) else None

    def read(self, name: str, most: int) -> bytes:
        """As `Store` says."""
        size = self.open(name).size
        if size > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(self.place / name))
        with told():
            return bytes(self._system.cat_file(self._at(name)))

    def write(self, name: str, data: bytes) -> None:
        """As `Store` says; an object of this name is replaced."""
        with told():
            try:
                self._system.pipe_file(self._at(name), data)
            except FileNotFoundError:
                self._make_folder()
                self._system.pipe_file(self._at(name), data)

    def _make_folder(self) -> None:
        """Where folders are more than parts of names; a bucket is for its owner to make."""
        bucket = self._root.lstrip("/").partition("/")[0]
        if not (self._root.startswith("/") or self._system.exists(bucket)):
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket", bucket)
        self._system.makedirs(self._root, exist_ok=True)

    def create(self, name: str) -> NewObject:
        """As `Store` says."""
        with told():
            return NewObject(self._system.open(self._at(name), "wb"))

    def open(self, name: str, *, links: bool = False) -> ObjectFile:
        """As `Store` says."""
        found = self._info(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "is not there", str(self.place / name))
        if not (_is_regular(found) or (links and found["type"] == "file")):
            raise OSError(errno.EINVAL, "is no regular file", str(self.place / name))
        return ObjectFile(self._system, self._at(name), found["size"])

    def remove(self, name: str) -> None:
        """As `Store` says."""
        with told(), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))

    def rename(self, name: str, to: str) -> None:
        """As `Store` says: what the one holds is written under the other name, then the one goes."""
        self.write(to, self.read(name, 1 << 30))
        self.remove(name)

    def sync(self) -> None:
        """As `Store` says: what the storage has taken stays."""

    def hold(self) -> NoHold:
        """As `Store` says; nobody is kept out."""
        return NoHold()

    def hold_there(self) -> NoHold:
        """As `Store` says."""
        if not self.exists():
            raise FileNotFoundError(errno.ENOENT, "is not there", str(self.place))
        return NoHold()

    def drop_empty(self) -> None:
        """As `Store` says: where folders are more than parts of names."""
        with contextlib.suppress(OSError), told():
            if not self._entries():
                self._system.rmdir(self._root)


def _last(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _is_regular(entry: dict[str, Any]) -> bool:
    return entry["type"] == "file" and not entry.get("islink", False)


def _open(place: Address) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415  an extra, and only addresses need it
    except ImportError:
        raise CheckpointError(
            f"{place} is an address, and those are reached through fsspec, which is not installed: "
            "pip install 'shardwright[fsspec]'"
        ) from None
    try:
        system, root = url_to_fs(str(place))
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{place} cannot be reached: {error}") from None
    return system, root.rstrip("/")
