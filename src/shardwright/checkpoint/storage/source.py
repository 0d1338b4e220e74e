"""The files of a checkpoint, or of somebody else, as they are opened: each of the size that is expected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.manifest import Manifest, SavedFile
from shardwright.errors import CheckpointError


class Source(NamedTuple):
    """The files that a reader reads: of a checkpoint, or of somebody else.

    Args: chunk: of checksums; 1: there are none. links: whether a file may be a link (in a shared cache).
    """

    path: Path
    files: Sequence[SavedFile]
    chunk: int
    links: bool = False

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> Source:
        """The files of a checkpoint."""
        return cls(path, manifest.files, manifest.chunk)


def open_file(source: Source, number: int) -> int:
    """A file of a checkpoint, of the size that the manifest says.

    Raises: CheckpointError: it is not there.
    """
    path, file = source.path, source.files[number]
    try:
        handle = disk.open_regular(path / file.name, links=source.links)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is damaged: its file {file.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: its file {file.name}: {error.strerror or error}") from None
    size = os.fstat(handle).st_size
    if size != file.size:
        os.close(handle)
        raise CheckpointError(
            f"{path} is damaged: its file {file.name} has {size} bytes, {file.size} were expected"
        )
    return handle


def check_sizes(source: Source, numbers: Iterable[int] | None = None) -> None:
    """Raises CheckpointError where one of these files (None: of all) is missing or has another size."""
    for number in range(len(source.files)) if numbers is None else numbers:
        os.close(open_file(source, number))
