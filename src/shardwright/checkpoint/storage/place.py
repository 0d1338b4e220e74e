"""Where a caller means a checkpoint to be: a path of the file system, or an address of object storage."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from urllib.parse import unquote

from shardwright.errors import CheckpointError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # of an address; `Path` makes one slash of its two
_CHAINED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::.*://?")
_FILE = "file"


@dataclass(frozen=True)
class Address:
    """A folder that fsspec reaches, such as `s3://bucket/run`: `/`, `name`, `parent` as of a `Path`."""

    text: str

    def __post_init__(self) -> None:
        """Raises: CheckpointError: it is none."""
        given: object = self.text
        if not isinstance(given, str) or not _SCHEME.match(given) or "://" not in given:
            raise CheckpointError(f"{given!r:.60} is no address: one begins like s3://bucket/folder")

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.text.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """What stands after the last slash."""
        return self.text.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Address:
        """The address without its last name."""
        scheme, mark, rest = self.text.rstrip("/").partition("://")
        return Address(scheme + mark + rest.rpartition("/")[0])

    def __str__(self) -> str:
        return self.text


Place = Path | Address


def place_of(where: Place | str) -> Place:
    """What a caller names. A path is absolute from here on, wherever the process goes; `~` is the home.

    `file://` is a path: the folder is the same, and there it has a lock, a rename and `fsync`.
    Raises: CheckpointError: an address that went through `Path`, which takes one of its slashes; one of
        several file systems on top of each other (`::`); one without a folder; the home of nobody; nothing.
    """
    if isinstance(where, Address):
        return where
    if not isinstance(where, str | PathLike):
        raise CheckpointError(f"{where!r:.60} is no path: give a text, a Path, or an address")
    if where == "":
        raise CheckpointError("the path is empty (a variable that was never set?): name a folder")
    found = _SCHEME.match(str(where))
    if "::" in str(where) and (found is not None or _CHAINED.match(str(where))):
        raise CheckpointError(
            f"{where}: file systems on top of each other (`::`) are not written to, since names of "
            "files are put at the end of an address; give the address of the storage itself"
        )
    if found is None:
        return _absolute(at_home(Path(where)))
    if isinstance(where, Path):
        raise CheckpointError(
            f"{where} is an address that was made a Path, which takes one of its slashes: give it as text"
        )
    if found[1].lower() == _FILE:
        return _path_of(where)
    if "://" not in where:
        raise CheckpointError(f"{where} is no address: one begins like s3://bucket/folder")
    if not where.partition("://")[2].strip("/"):
        raise CheckpointError(f"{where} names no folder: write {found[1]}://bucket/folder")
    return Address(where.rstrip("/"))


def at_home(path: Path) -> Path:
    """`~/run` in the user's home, where no shell has said so already.

    Raises: CheckpointError: there is no such home, or no file system has such a name.
    """
    try:
        found = path.expanduser()
    except RuntimeError:
        raise CheckpointError(
            f"{path} begins with the home folder of a user who is not known here: give the path from / on"
        ) from None
    _refuse_no_name(found)
    return found


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is named from the folder in which this process is, and that is gone: give the path from "
            "/ on"
        ) from None


def _refuse_no_name(path: Path) -> None:
    why = ""
    try:
        path.lstat()
    except OSError as error:
        why = "it is too long" if error.errno == errno.ENAMETOOLONG else ""
    except UnicodeEncodeError as error:
        why = f"names are {error.encoding} here, which has no such characters (PYTHONUTF8=1 makes it UTF-8)"
    except ValueError:
        why = "it holds a byte of zero"
    if why:
        raise CheckpointError(f"no folder can be called {str(path)!r:.80}: {why}")


def _path_of(address: str) -> Path:
    host, slash, path = address.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise CheckpointError(f"{address} names no absolute path: write file:///folder, with three slashes")
    return Path(slash + unquote(path))


def folder_of(path: Place | str) -> Path:
    """A folder of the file system, where only such a one will do.

    Raises: CheckpointError: it is an address of object storage.
    """
    found = place_of(path)
    if isinstance(found, Address):
        raise CheckpointError(
            f"{found} is an address, and files of other programs are read and written in folders of a file "
            "system: mount that storage and name the folder, or copy it"
        )
    return found
