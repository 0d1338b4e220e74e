"""Files that survive a crash: written, synced to the disk, and only then named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import xxhash

from shardwright.checkpoint.manifest import NAME, Manifest, SavedFile
from shardwright.errors import CheckpointError

_BLOCK = 1 << 22
PARTIAL = ".partial"
REMOVED = ".removed"


def partial_of(path: Path) -> Path:
    """Where the checkpoint `path` is written until it is complete."""
    return path.with_name(path.name + PARTIAL)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe_file(path: Path) -> SavedFile:
    """Size and checksum of a file, read from the disk (or the system's cache)."""
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return SavedFile(size=size, checksum=digest.hexdigest())


def commit(path: Path, manifest: Manifest) -> None:
    """Turn the partial folder of `path` into the checkpoint `path`. The rename is the commit point.

    Until then a crash leaves the partial folder, afterwards a complete checkpoint. An older checkpoint of
    this name is put aside just before and removed just after.
    """
    partial = partial_of(path)
    with (partial / NAME).open("w", encoding="utf-8") as stream:
        stream.write(manifest.dump())
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(partial)
    doomed = _put_aside(path) if path.exists() else None
    partial.rename(path)
    sync_folder(path.parent)
    if doomed is not None:
        shutil.rmtree(doomed)


def start_partial(path: Path) -> None:
    """Make an empty partial folder for `path`; one that an earlier run left is removed.

    Raises: CheckpointError: `path` is there and is no checkpoint.
    """
    if path.exists() and not any((path / name).exists() for name in (NAME, ".metadata")):
        raise CheckpointError(f"{path} is there and is no checkpoint: save under another name, or remove it")
    partial = partial_of(path)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    sync_folder(partial.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that a crash half-way leaves nothing that looks complete."""
    shutil.rmtree(_put_aside(path))


def _put_aside(path: Path) -> Path:
    doomed = path.with_name(path.name + REMOVED)
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    return doomed


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError where a file of the checkpoint is missing or has another size."""
    for name, saved in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: its file {name} is missing")
        size = file.stat().st_size
        if size != saved.size:
            raise CheckpointError(
                f"{path} is damaged: its file {name} has {size} bytes, the manifest says {saved.size}"
            )


def check_content(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raises CheckpointError where the bytes of one of the named files are not those that were saved."""
    for name in names:
        if describe_file(path / name) != manifest.files[name]:
            raise CheckpointError(
                f"{path} is damaged: its file {name} is not what was saved (wrong checksum); "
                "check the disk, and name an older checkpoint"
            )
