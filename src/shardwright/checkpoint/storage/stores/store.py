"""What a checkpoint needs of the place where its files are; `local` and `objects` are the two that do it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shardwright.checkpoint.storage.place import Place


class OpenFile(Protocol):
    """A file that is read in ranges."""

    size: int

    @property
    def step(self) -> int:
        """Bytes of one read that serve best: what the cache holds here, what is worth a request there."""

    def read_into(self, pieces: Sequence[memoryview], at: int) -> None:
        """Fill the pieces (at most 1,024) with what stands from byte `at` on. Raises: EOFError: it ends."""

    def keep(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have the bytes [low, high) of these ranges kept in memory, as far as the place can do that."""

    def hold(self, at: int, nbytes: int) -> memoryview | None:
        """These bytes, if they are `keep`ed in memory, which they are as long as they are used; else None.

        A file that somebody cuts short takes them away: see `is_whole`.
        """

    def is_whole(self) -> bool:
        """Whether the file has the size that it had."""

    def close(self) -> None:
        """Let it go; what is held stays."""


class NewFile(Protocol):
    """A file that is written once, from its start to its end."""

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Append the pieces (at most 1,024)."""

    def finish(self) -> None:
        """Wait until all of it is where it stays, and let it go."""

    def give_up(self) -> None:
        """Let it go as it is; somebody removes it."""


class Hold(Protocol):
    """A folder that one save has for itself, as far as the place knows such a thing."""

    @property
    def alone(self) -> bool:
        """Whether nobody else can write there."""

    def settle(self) -> None:
        """Make the folder itself durable, where it was made."""

    def check(self) -> None:
        """Raises CheckpointError where the folder is not there any more."""

    def let_go(self, *, drop: bool = False) -> None:
        """End it; `drop`: the folder too, where this save made it and nothing is left in it."""


class Store(Protocol):
    """The files of one folder, by name. Every method raises OSError where the place refuses."""

    @property
    def place(self) -> Place:
        """Where it is."""

    @property
    def renames(self) -> bool:
        """Whether a name changes its file in one instant; else a name is written, and may be cut short."""

    def exists(self) -> bool:
        """Whether there is such a folder."""

    def is_link(self) -> bool:
        """Whether the folder is a link to another one."""

    def names(self) -> list[str]:
        """What is in it, sorted, as it is now."""

    def folders(self) -> list[str]:
        """The folders in it, sorted."""

    def has(self, name: str) -> bool:
        """Whether the name is there, whatever it is."""

    def size(self, name: str) -> int | None:
        """Bytes in a regular file that is no link; None: there is no such file."""

    def read(self, name: str, most: int) -> bytes:
        """A whole file. Raises: OSError: it has more than `most` bytes."""

    def write(self, name: str, data: bytes) -> None:
        """A new file, which stays when this returns."""

    def create(self, name: str) -> NewFile:
        """A new file to write."""

    def open(self, name: str, *, links: bool = False) -> OpenFile:
        """A file to read. Raises: OSError: it is no regular file, or (without `links`) a link."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def rename(self, name: str, to: str) -> None:
        """Give a file another name, whose file, if there is one, is replaced."""

    def sync(self) -> None:
        """Make the names durable."""

    def hold(self) -> Hold:
        """Make the folder if need be, and keep others out. Raises: CheckpointError: somebody is there."""

    def hold_there(self) -> Hold:
        """The same of a folder that is there. Raises: OSError: it is not."""

    def drop_empty(self) -> None:
        """Remove the folder, if nothing is in it."""
