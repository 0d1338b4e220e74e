"""A checkpoint's folder while it is written: one rename is the commit, and whoever comes next tidies up.

The manifest alone says which files are the checkpoint. A save writes new files beside the old ones, under
names that no other save has; when all are on the disk, its manifest takes the old one's place in a rename.
Before it the old checkpoint is what `path` holds, after it the new one. What is then in nobody's manifest is
removed, by this save or, if it dies, by the next.
"""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Sequence

from shardwright.checkpoint.storage.folder_names import (
    DATA,
    REMOVING,
    Content,
    Journal,
    is_committed,
    leftovers,
    look,
)
from shardwright.checkpoint.storage.manifest import NAME, Head
from shardwright.checkpoint.storage.owner import saves_here, this_process
from shardwright.checkpoint.storage.place import Place
from shardwright.checkpoint.storage.stores.of import store_of
from shardwright.checkpoint.storage.stores.store import Hold, Store
from shardwright.checkpoint.storage.writer import Written
from shardwright.errors import CheckpointError


class Saving:
    """A save under way, on the rank that commits: it holds the folder until it is closed."""

    def __init__(self, path: Place) -> None:
        """Take the folder; nothing is written before `begin`.

        Raises: CheckpointError: another process writes there, or what is there is not ours.
        """
        self.path = path
        self.id = secrets.token_hex(8)
        self._store = store_of(path)
        self._renamed = False
        self._hold: Hold | None = self._store.hold()
        try:
            saves_here.add(self.id)
            content = look(self._store)
            _refuse_strangers(path, content)
            if not self._hold.alone:
                _refuse_living(path, content)
        except BaseException:
            self.abandon()
            raise

    def begin(self) -> None:
        """Tidy up after others, and say that a save is under way. Raises: OSError: the disk refuses."""
        if self._hold is None:
            raise CheckpointError(f"the save to {self.path} has ended")
        try:
            content = finished(self._store, look(self._store))
            tidy(self._store, content, alone=self._hold.alone)
            journal = Journal(self.id, content.replaceable, this_process())
            self._store.write(f"saving-{self.id}.json", journal.text)
            self._store.sync()
            self._hold.settle()
        except BaseException:
            self.abandon()
            raise

    def check(self) -> None:
        """Raises CheckpointError where somebody has taken away what `begin` wrote."""
        if not self._store.has(f"saving-{self.id}.json"):
            raise CheckpointError(
                f"{self.path} was removed or emptied while it was written (saving-{self.id}.json is gone): "
                "look for what cleans up there, and save again"
            )

    def commit(self, text: bytes, files: Sequence[Written]) -> None:
        """Make the save the checkpoint: confirm its files, write its manifest, give that its name.

        Raises: CheckpointError: a file is not there, or has another size; nothing was committed then.
        """
        store, hold = self._store, self._hold
        if hold is None:
            raise CheckpointError(f"the save to {self.path} has ended")
        self.check()
        for file in files:
            _confirm(store, file)
        store.write(f"manifest-{self.id}.new", text)
        store.sync()
        hold.check()
        self._rename()
        store.sync()
        # The checkpoint counts from here on; what is left to do, the next save does if this one cannot. A
        # storage that does not show it yet would have its files taken for those of a save that failed.
        with contextlib.suppress(OSError):
            content = look(store)
            if content.manifest is not None and content.manifest.id == self.id:
                tidy(store, content, self.id, alone=hold.alone)
        self.close()

    def _rename(self) -> None:
        """Give the manifest its name. Where that is no one instant, an error may come after it has it."""
        try:
            self._store.rename(f"manifest-{self.id}.new", NAME)
        except OSError:
            if self._store.renames or not is_committed(self._store, self.id):
                raise
        self._renamed = True

    def abandon(self) -> None:
        """Remove what this save wrote, as far as the disk lets it, and let the folder go."""
        if self._hold is None:
            return
        try:
            with contextlib.suppress(OSError, CheckpointError):
                content = finished(self._store, look(self._store))
                # Once renamed, what this save wrote is the checkpoint, whatever failed afterwards.
                tidy(self._store, content, "" if self._renamed else self.id, alone=self._hold.alone)
        finally:  # Ctrl-C too
            self.close(drop=not self._renamed)

    def close(self, *, drop: bool = False) -> None:
        """Let the folder go; `drop`: the folder too, where this save made it and nothing is in it."""
        hold, self._hold = self._hold, None
        saves_here.discard(self.id)
        if hold is not None:
            hold.let_go(drop=drop)


def finished(store: Store, content: Content) -> Content:
    """What is in the folder once a manifest that was cut while it got its name has been written again."""
    if not content.redo:
        return content
    # Another machine may finish the same commit; the other name goes once all is written under this one.
    with contextlib.suppress(FileNotFoundError):
        store.rename(content.redo, NAME)
    return look(store)


def _refuse_living(path: Place, content: Content) -> None:
    """Without a lock the journals tell who writes here, as far as this machine can know.

    Raises: CheckpointError: a process that is alive. Warns of what may be alive on another machine.
    """
    for journal in content.journals.values():
        if journal is None or journal.owner is None:
            continue
        if journal.owner.lives(journal.id):
            raise CheckpointError(
                f"{path} is being written by another process (or another save of this one; save "
                f"{journal.id} of {journal.owner}): wait for it, or name another folder"
            )
        if not journal.owner.ended(journal.id):
            warnings.warn(
                f"{path}: save {journal.id} of {journal.owner} was interrupted or is under way, which cannot "
                "be known from here: its files are kept; if no run writes there, `shardwright checkpoint "
                "prune --interrupted` removes them",
                stacklevel=2,
            )


def _refuse_strangers(path: Place, content: Content) -> None:
    """Raises CheckpointError where a folder holds what this library did not write."""
    if content.committed and not content.recognised:
        raise CheckpointError(
            f"{path} is there and is no checkpoint of this library: its {NAME} is somebody else's (or "
            "damaged beyond recognition). Save under another name, or remove it yourself"
        )
    if not content.committed and content.strangers:
        raise CheckpointError(
            f"{path} is there and is no checkpoint (it holds {content.strangers[0]!r}): save under another "
            "name, or remove it yourself"
        )


def _confirm(store: Store, file: Written) -> None:
    size = store.size(file.name)
    if size is None:
        raise CheckpointError(
            f"{file.name} was written by its rank, but the rank that commits does not find it in "
            f"{store.place}: the ranks do not share this file system (a disk of one node?); name a folder "
            "that all of them see"
        )
    if size != file.size:
        raise CheckpointError(f"{store.place / file.name} has {size} bytes, its rank wrote {file.size}")


def tidy(
    store: Store, content: Content, mine: str = "", *, alone: bool = True, interrupted: bool = False
) -> None:
    """Finish or roll back what an earlier save or removal left (or `mine`).

    Only what is proven to be this library's goes: files of a save that a journal or their own header names,
    and those that a committed save replaced.

    Args:
        alone: the folder is locked. Without that only what `mine` and saves that have provably ended wrote
            or replaced goes.
        interrupted: the user says that no save is under way.
    """
    alone = alone or interrupted
    removals = alone or not store.renames  # there, a removal that was cut is told from its own text
    for name in content.names:
        if removals and REMOVING.fullmatch(name):
            _remove_listed(store, name)
    for name in dict.fromkeys([*leftovers(store, content, mine, alone=alone)]):
        store.remove(name)


def remove(path: Place, *, interrupted: bool = False) -> None:
    """Remove a checkpoint: first its name, so that a crash half-way leaves nothing that looks complete.

    Where the file system has no locks, only what its manifest names goes.
    Raises: CheckpointError: it is being written, or is none of this library's; nothing is removed then.
    """
    store = store_of(path)
    hold = store.hold_there()
    try:
        content = look(store)
        _refuse_strangers(path, content)
        content = finished(store, content)
        if content.manifest is not None:
            removing = f"removing-{content.manifest.id}.json"
            store.rename(NAME, removing)
            _remove_listed(store, removing)
        elif content.committed:
            for name in (NAME, *content.legacy):
                store.remove(name)
        if hold.alone or interrupted or not store.renames:
            tidy(store, look(store), alone=hold.alone, interrupted=interrupted)
        store.drop_empty()
    finally:
        hold.let_go()


def _remove_listed(store: Store, name: str) -> None:
    """Go on with a removal: its journal is the manifest that the checkpoint had."""
    try:
        manifest = Head.parse(store.read(name, 1 << 30))
    except (OSError, EOFError, CheckpointError):
        return
    kept = look(store).replaceable
    for file in manifest.files:
        if DATA.fullmatch(file.name) and file.name not in kept:
            store.remove(file.name)
    store.remove(name)
