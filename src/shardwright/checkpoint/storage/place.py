"""The folder that a caller means."""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.errors import CheckpointError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # of an address; `Path` makes one slash of its two


def folder_of(path: Path | str) -> Path:
    """A path of the file system, absolute from here on, wherever the process goes.

    Raises: CheckpointError: it is an address of object storage, which would be made a local folder.
    """
    if _SCHEME.match(str(path)):
        raise CheckpointError(
            f"{path} is an address, and checkpoints are in folders of a file system: mount that storage and "
            "name the folder, or save to a disk and copy the folder with the manifest last"
        )
    return Path(path).absolute()
