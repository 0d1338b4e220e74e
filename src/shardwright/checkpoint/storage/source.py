"""The files of a checkpoint, or of somebody else, as they are opened: each of the size that is expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwright.checkpoint.storage.manifest import Manifest, SavedFile
from shardwright.checkpoint.storage.place import Place
from shardwright.checkpoint.storage.stores.of import store_of
from shardwright.checkpoint.storage.stores.store import OpenFile
from shardwright.errors import CheckpointError, reason_of


class Source(NamedTuple):
    """The files that a reader reads: of a checkpoint, or of somebody else.

    Args: chunk: of checksums; 1: there are none. links: whether a file may be a link (in a shared cache).
    """

    path: Place
    files: Sequence[SavedFile]
    chunk: int
    links: bool = False

    @classmethod
    def of(cls, path: Place, manifest: Manifest) -> Source:
        """The files of a checkpoint."""
        return cls(path, manifest.files, manifest.chunk)


def open_file(source: Source, number: int) -> OpenFile:
    """A file of a checkpoint, of the size that the manifest says.

    Raises: CheckpointError: it is not there.
    """
    path, file = source.path, source.files[number]
    try:
        found = store_of(path).open(file.name, links=source.links)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is damaged: its file {file.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: its file {file.name}: {reason_of(error)}") from None
    if found.size != file.size:
        found.close()
        raise CheckpointError(
            f"{path} is damaged: its file {file.name} has {found.size} bytes, {file.size} were expected"
        )
    return found


def check_sizes(source: Source, numbers: Iterable[int] | None = None) -> None:
    """Raises CheckpointError where one of these files (None: of all) is missing or has another size."""
    for number in range(len(source.files)) if numbers is None else numbers:
        open_file(source, number).close()
