"""What stands in a checkpoint's folder, told apart by name and proven by content.

    manifest.json                              the checkpoint; without it there is none
    data-<save>-<rank>-<number>.safetensors    the data of a save
    saving-<save>.json                         a save that is under way, or was interrupted; names what it
    replaces manifest-<save>.new                        its manifest, before it gets its name
    removing-<save>.json                       the manifest of a checkpoint that is being removed

<save> is 16 random hex digits, made for each save: no two saves ever write one file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.checkpoint.storage import disk, legacy
from shardwright.checkpoint.storage.manifest import NAME, PREFIX, Head
from shardwright.errors import CheckpointError

_ID = r"([0-9a-f]{16})"
DATA = re.compile(rf"data-{_ID}-\d{{5,}}-\d{{3,}}\.safetensors")
SAVING = re.compile(rf"saving-{_ID}\.json")
NEW = re.compile(rf"manifest-{_ID}\.new")
REMOVING = re.compile(rf"removing-{_ID}\.json")
_REPLACED = re.compile(rf"{DATA.pattern}|{legacy.FILES.pattern}")
_OURS = (DATA, SAVING, NEW, REMOVING)
_JOURNAL = "shardwright save"
_MOST_JOURNAL = 1 << 26


@dataclass(frozen=True)
class Journal:
    """A save that began: its id, and the files of the checkpoint that it replaces."""

    id: str
    replaces: tuple[str, ...] = ()

    @property
    def text(self) -> bytes:
        """As it stands in the file."""
        return json.dumps({"format": _JOURNAL, "id": self.id, "replaces": self.replaces}).encode()


@dataclass
class Content:
    """What is in a folder: journals by name, our names, and whether there is a manifest of this library."""

    names: list[str]
    journals: dict[str, Journal | None] = field(default_factory=dict)
    manifest: Head | None = None
    legacy: tuple[str, ...] = ()
    committed: bool = False
    recognised: bool = False

    @property
    def strangers(self) -> list[str]:
        """Names that this library does not write."""
        known = {NAME, *self.replaceable} if self.recognised else set()
        return [n for n in self.names if n not in known and not any(p.fullmatch(n) for p in _OURS)]

    @property
    def unreadable(self) -> bool:
        """Whether there is a manifest that does not say which files are its own."""
        return self.committed and self.manifest is None and not self.legacy

    @property
    def replaceable(self) -> tuple[str, ...]:
        """The files of the checkpoint that is there, as its manifest says."""
        named = (file.name for file in self.manifest.files) if self.manifest else ()
        return self.legacy or tuple(name for name in named if DATA.fullmatch(name))


def look(path: Path) -> Content:
    """What is in a folder. Raises: OSError: it cannot be read."""
    content = Content(sorted(one.name for one in path.iterdir()))
    for name in content.names:
        if SAVING.fullmatch(name):
            content.journals[name] = _read_journal(path / name)
    if NAME in content.names:
        content.committed = True
        _look_at_manifest(path, content)
    return content


def is_committed(path: Path, save: str) -> bool:
    """Whether this save is the checkpoint. Raises: OSError, CheckpointError: its manifest cannot be read."""
    if disk.size_of(path / NAME) is None:
        return False
    return Head.parse(disk.read_small(path / NAME, 1 << 30)).id == save


def _look_at_manifest(path: Path, content: Content) -> None:
    if disk.size_of(path / NAME) is None:
        return  # a link, a folder: nothing that this library writes
    text = disk.read_small(path / NAME, 1 << 30)
    with contextlib.suppress(CheckpointError):
        content.manifest = Head.parse(text)
    content.legacy = () if text.startswith(PREFIX) else legacy.files_of(text)
    content.recognised = text.startswith(PREFIX) or bool(content.legacy) or _made_by_us(path, content.names)


def _made_by_us(path: Path, names: list[str]) -> bool:
    """Whether a data file beside a damaged manifest says of itself that this library wrote it."""
    return any(wrote(path, name) for name in names if DATA.fullmatch(name))


def wrote(path: Path, name: str) -> bool:
    """Whether the header of a data file says that this library wrote it, in the save of its name."""
    found = DATA.fullmatch(name)
    with contextlib.suppress(OSError, EOFError):
        handle = disk.open_regular(path / name)
        try:
            start = bytearray(min(200, os.fstat(handle).st_size))
            disk.read_into(handle, [memoryview(start)], 0)
        finally:
            os.close(handle)
        return found is not None and metadata_text(found[1]) in bytes(start)
    return False


def metadata(save: str) -> dict[str, str]:
    """What the header of a data file says of its save."""
    return {"format": "shardwright", "save": save}


def metadata_text(save: str) -> bytes:
    """The same as it stands in the file."""
    return json.dumps(metadata(save), separators=(",", ":")).encode()


def _read_journal(path: Path) -> Journal | None:
    """The journal; None: it is not one, or was cut."""
    try:
        found = json.loads(disk.read_small(path, _MOST_JOURNAL))
        replaces = tuple(found["replaces"])
        fits = found["format"] == _JOURNAL and path.name == f"saving-{found['id']}.json"
        if fits and all(isinstance(one, str) and _REPLACED.fullmatch(one) for one in replaces):
            return Journal(found["id"], replaces)
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def leftovers(path: Path, content: Content, mine: str = "", *, alone: bool = True) -> Iterator[str]:
    """Names that an interrupted save or removal left and that are proven to be ours; journals come last.

    Args:
        mine: the save of this process, of which nothing needs to be proven.
        alone: whether no other save can be under way; else only what belongs to `mine` is named.
    """
    if content.unreadable:
        # Which of the files are its own cannot be known before another one takes its place.
        yield from (name for name in content.names if mine and f"-{mine}" in name)
        return
    here, now = set(content.names), content.manifest.id if content.manifest else ""
    kept = {*content.replaceable, NAME}
    journals = {n: one for n, one in content.journals.items() if alone or n == f"saving-{mine}.json"}
    known = {one.id for one in journals.values() if one is not None} | {mine}
    for name in content.names:
        found = DATA.fullmatch(name) or NEW.fullmatch(name)
        left = found and found[1] != now and name not in kept
        if found and left and (found[1] in known or (alone and wrote(path, name))):
            yield name
    for journal in journals.values():
        if journal is not None and journal.id == now:
            yield from (name for name in journal.replaces if name in here and name not in kept)
    if alone:
        yield from _emptied(path, content)
    yield from (n for n, journal in journals.items() if journal or n == f"saving-{mine}.json")


def _emptied(path: Path, content: Content) -> Iterator[str]:
    """Files of our names without a byte, as a crash leaves them: nothing is lost with them."""
    for name in content.names:
        cut = (SAVING.fullmatch(name) and content.journals[name] is None) or NEW.fullmatch(name)
        if cut and disk.size_of(path / name) == 0:
            yield name
