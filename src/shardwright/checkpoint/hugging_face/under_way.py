"""The folder of an export while it is written, so that whoever comes next rolls back an interrupted one.

    saving-<export>.json                          it is under way, or was interrupted
    .model-00001-of-00003.safetensors.<export>    a file, before it gets its name

The index gets its name last, or else the only file: that is the commit. Until then what has a name already is
known by its header, which names the export.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from shardwright.checkpoint.hugging_face.index import INDEX, SINGLE
from shardwright.checkpoint.storage.commit import tidy
from shardwright.checkpoint.storage.folder_names import Journal, look, says
from shardwright.checkpoint.storage.owner import saves_here, this_process
from shardwright.checkpoint.storage.stores.local import LocalHold, LocalStore
from shardwright.errors import CheckpointError

_BEFORE = re.compile(r"\.model.*\.([0-9a-f]{16})")
_NAMED = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")


def metadata(export: str) -> dict[str, str]:
    """What the header of a file says: the format that `transformers` asks for, and of which export it is."""
    return {"format": "pt", "save": export}


def before_named(name: str, export: str) -> str:
    """What a file is called until the commit."""
    return f".{name}.{export}"


def is_seen(folder: Path, export: str) -> bool:
    """Whether the journal of an export is there."""
    return LocalStore(folder).has(_journal(export))


class UnderWay:
    """An export on the rank that commits: it holds the folder until it is closed."""

    def __init__(self, folder: Path, export: str) -> None:
        """Nothing is done before `begin`: what an interrupt takes from the caller leaves nothing behind."""
        self._export, self._store, self._done = export, LocalStore(folder), False
        self._new_folders = [one for one in (folder, *folder.parents) if not one.exists()]
        self._hold: LocalHold | None = None

    def begin(self) -> None:
        """Keep others out, roll back what interrupted exports left, and say that this one is under way.

        Raises: CheckpointError: there are such files, or another process writes there; `close` it then too.
        """
        self._hold = self._store.hold()
        saves_here.add(self._export)
        _roll_back(self._store, alone=self._hold.alone)
        taken = next((name for name in self._store.names() if ".safetensors" in name), None)
        if taken:
            raise CheckpointError(
                f"{self._store.place} holds {taken} already: name another folder, or remove it"
            )
        self._store.write(_journal(self._export), Journal(self._export, (), this_process()).text)

    def commit(self, names: Sequence[str], index: bytes) -> None:
        """Give the files their names, the index last; there is none (no text) of a single file.

        Raises: CheckpointError: a file is not there.
        """
        store, hold = self._store, self._hold
        if hold is None:
            raise CheckpointError(f"the export to {store.place} has ended")
        hold.check()
        for name in names:
            if store.size(before_named(name, self._export)) is None:
                raise CheckpointError(
                    f"{name} was written by its rank, but the rank that commits does not find it in "
                    f"{store.place}: was it removed, or do the ranks not share this file system?"
                )
        if index:
            store.write(before_named(INDEX, self._export), index)
        store.sync()
        for name in (*names, INDEX) if index else names:
            store.rename(before_named(name, self._export), name)
        store.sync()
        store.remove(_journal(self._export))
        self._done = True

    def close(self) -> None:
        """Let others in; what was not committed goes, as far as the disk lets it."""
        if self._hold is None:
            return
        try:
            if not self._done:
                self._undo(alone=self._hold.alone)
        finally:  # Ctrl-C too
            saves_here.discard(self._export)
            self._hold.let_go()

    def _undo(self, *, alone: bool) -> None:
        with contextlib.suppress(OSError):
            _roll_back(self._store, self._export, alone=alone)
        for made in self._new_folders:
            with contextlib.suppress(OSError):  # there is something in it
                made.rmdir()


def _journal(export: str) -> str:
    return f"saving-{export}.json"


def _roll_back(store: LocalStore, mine: str = "", *, alone: bool) -> None:
    """Remove what exports left that are not committed, and `mine`, as far as it is proven to be theirs."""
    content = look(store)
    journals = [one for one in content.journals.values() if one is not None]
    over = {one.id for one in journals if alone or one.ended or one.id == mine}
    committed = not {SINGLE, INDEX}.isdisjoint(content.names)
    for name in content.names:
        found = _BEFORE.fullmatch(name)
        if found is not None:
            proven = found[1] in over or (alone and says(store, name, _text(found[1])))
        else:
            named = _NAMED.fullmatch(name) is not None and not committed
            proven = named and any(says(store, name, _text(export)) for export in over)
        if proven:
            store.remove(name)
    tidy(store, look(store), mine, alone=alone)
    left = store.names()
    for export in over:  # without a lock they are still there
        if not any(export in name for name in left if name != _journal(export)):
            store.remove(_journal(export))


def _text(export: str) -> bytes:
    return f'"save":"{export}"'.encode()
