"""A checkpoint's folder while it is written: one rename is the commit, and whoever comes next tidies up.

The manifest alone says which files are the checkpoint. A save writes new files beside the old ones, under
names
that no other save has; when all are on the disk, its manifest takes the place of the old one, in one rename.
Before it the old checkpoint is what `path` holds, after it the new one. What is then in nobody's manifest is
removed, by this save or, if it dies, by the next.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path

from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.folder_names import DATA, REMOVING, Content, Journal, leftovers, look
from shardwright.checkpoint.storage.manifest import NAME, Head
from shardwright.checkpoint.storage.writer import Written
from shardwright.errors import CheckpointError


class Saving:
    """A save under way, on the rank that commits: it holds the folder's lock until it is closed."""

    def __init__(self, path: Path) -> None:
        """Begin. Raises: CheckpointError: another process writes there, or what is there is not ours."""
        self.path = path
        self.id = secrets.token_hex(8)
        self._made = False
        self._alone = True
        self._renamed = False
        self._handle = self._lock()
        try:
            content = look(path)
            _refuse_strangers(path, content)
            if self._alone:
                tidy(path, content)
            self._journal = Journal(self.id, content.replaceable)
            disk.write_small(self._journal_path, self._journal.text)
            disk.sync_folder(path)
            if self._made:
                disk.sync_folder(path.parent)
        except BaseException:
            self.abandon()
            raise

    @property
    def _journal_path(self) -> Path:
        return self.path / f"saving-{self.id}.json"

    def _lock(self) -> int:
        for _ in range(100):  # another save that gave up may remove the folder that it made
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(parents=True)
                self._made = True
            try:
                handle, self._alone = lock_or_warn(self.path)
            except FileNotFoundError:
                continue
            if disk.is_at(handle, self.path):
                return handle
            disk.unlock_folder(handle)
        raise CheckpointError(f"{self.path} is made and removed again and again by somebody else")

    def commit(self, text: bytes, files: Sequence[Written]) -> None:
        """Make the save the checkpoint: confirm its files, write its manifest, rename it.

        Raises: CheckpointError: a file is not there, or has another size; nothing was committed then.
        """
        for file in files:
            _confirm(self.path, file)
        new = self.path / f"manifest-{self.id}.new"
        disk.write_small(new, text)
        disk.sync_folder(self.path)
        if not disk.is_at(self._handle, self.path):
            raise CheckpointError(f"{self.path} was moved or removed while it was written")
        new.rename(self.path / NAME)
        self._renamed = True
        disk.sync_folder(self.path)
        # The checkpoint counts from here on; what is left to do, the next save does if this one cannot.
        with contextlib.suppress(OSError):
            tidy(self.path, look(self.path), self.id, alone=self._alone)
        self.close()

    def abandon(self) -> None:
        """Remove what this save wrote, as far as the disk lets it, and let the folder go."""
        if self._handle < 0:
            return
        with contextlib.suppress(OSError, CheckpointError):
            # Once renamed, what this save wrote is the checkpoint, whatever failed afterwards.
            tidy(self.path, look(self.path), "" if self._renamed else self.id, alone=self._alone)
            if self._made and not self._renamed:
                self.path.rmdir()
        self.close()

    def close(self) -> None:
        """Let the folder go."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            disk.unlock_folder(handle)


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


def _refuse_strangers(path: Path, content: Content) -> None:
    """Raises CheckpointError where a folder holds what this library did not write."""
    if content.committed and not content.recognised:
        raise CheckpointError(
            f"{path} is there and is no checkpoint of this library: its {NAME} is somebody else's (or "
            "damaged "
            "beyond recognition). Save under another name, or remove it yourself"
        )
    if not content.committed and content.strangers:
        raise CheckpointError(
            f"{path} is there and is no checkpoint (it holds {content.strangers[0]!r}): save under another "
            "name, or remove it yourself"
        )


def _confirm(path: Path, file: Written) -> None:
    size = disk.size_of(path / file.name)
    if size is None:
        raise CheckpointError(
            f"{file.name} was written by its rank, but the rank that commits does not find it in {path}: "
            "the ranks do not share this file system (a disk of one node?); name a folder that all of "
            "them see"
        )
    if size != file.size:
        raise CheckpointError(f"{path / file.name} has {size} bytes, its rank wrote {file.size}")


def tidy(path: Path, content: Content, mine: str = "", *, alone: bool = True) -> None:
    """Finish or roll back what an earlier save or removal left (or `mine`); the folder's lock is held.

    Without a lock (not `alone`) another save may be under way: only what `mine` wrote and replaced goes.

    Only what is proven to be this library's goes: files of a save that a journal or their own header names,
    and those that a committed save replaced.
    """
    for name in content.names:
        if alone and REMOVING.fullmatch(name):
            _remove_listed(path, name)
    gone = list(leftovers(path, content, mine, alone=alone))
    for name in dict.fromkeys(gone):
        _unlink(path / name)
    if gone:
        disk.sync_folder(path)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that a crash half-way leaves nothing that looks complete.

    Where the file system has no locks, only what its manifest names goes.
    Raises: CheckpointError: it is being written, or is none of this library's; nothing is removed then.
    """
    handle, alone = lock_or_warn(path)
    try:
        content = look(path)
        _refuse_strangers(path, content)
        if content.manifest is not None:
            removing = f"removing-{content.manifest.id}.json"
            (path / NAME).rename(path / removing)
            _remove_listed(path, removing)
        elif content.committed:
            _remove_damaged(path, content)
        if alone:
            tidy(path, look(path))
        with contextlib.suppress(OSError):
            path.rmdir()  # what is not ours keeps it there
    finally:
        disk.unlock_folder(handle)


def _remove_damaged(path: Path, content: Content) -> None:
    _unlink(path / NAME)
    for name in content.legacy:
        _unlink(path / name)


def _remove_listed(path: Path, name: str) -> None:
    """Go on with a removal: its journal is the manifest that the checkpoint had."""
    try:
        manifest = Head.parse(disk.read_small(path / name, 1 << 30))
    except (OSError, EOFError, CheckpointError):
        return
    kept = look(path).replaceable
    for file in manifest.files:
        if DATA.fullmatch(file.name) and file.name not in kept:
            _unlink(path / file.name)
    _unlink(path / name)
