"""What stands in a checkpoint's folder, told apart by name and proven by content.

    manifest.json                              the checkpoint; without it there is none
    data-<save>-<rank>-<number>.safetensors    the data of a save
    saving-<save>.json                         a save that is under way, or was interrupted; names its process
                                               and what it replaces
    manifest-<save>.new                        its manifest, before it gets its name
    removing-<save>.json                       the manifest of a checkpoint that is being removed

<save> is 16 random hex digits, made for each save: no two saves ever write one file.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from shardwright.checkpoint.storage import legacy
from shardwright.checkpoint.storage.manifest import NAME, NEW, PREFIX, Head, text_that_counts
from shardwright.checkpoint.storage.owner import Owner
from shardwright.checkpoint.storage.stores.store import Store
from shardwright.errors import CheckpointError

_ID = r"([0-9a-f]{16})"
DATA = re.compile(rf"data-{_ID}-[0-9]{{5,}}-[0-9]{{3,}}\.safetensors")
SAVING = re.compile(rf"saving-{_ID}\.json")
REMOVING = re.compile(rf"removing-{_ID}\.json")
_REPLACED = re.compile(rf"{DATA.pattern}|{legacy.FILES.pattern}")
_OURS = (DATA, SAVING, NEW, REMOVING)
_JOURNAL = "shardwright save"
_MOST_JOURNAL = 1 << 26


@dataclass(frozen=True)
class Journal:
    """A save that began: its id, the files of the checkpoint that it replaces, the process that commits."""

    id: str
    replaces: tuple[str, ...] = ()
    owner: Owner | None = None

    @property
    def text(self) -> bytes:
        """As it stands in the file."""
        told: dict[str, object] = {"format": _JOURNAL, "id": self.id, "replaces": self.replaces}
        return json.dumps(told | ({"owner": asdict(self.owner)} if self.owner else {})).encode()

    @property
    def ended(self) -> bool:
        """Whether it is certain that the process that made it writes no more."""
        return self.owner is not None and self.owner.ended(self.id)


@dataclass
class Content:
    """What is in a folder: journals by name, our names, and whether there is a manifest of this library.

    Args: redo: where the whole manifest of a commit stands that was cut while it wrote `manifest.json`.
    """

    names: list[str]
    journals: dict[str, Journal | None] = field(default_factory=dict)
    manifest: Head | None = None
    legacy: tuple[str, ...] = ()
    committed: bool = False
    recognised: bool = False
    redo: str = ""

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


def look(store: Store) -> Content:
    """What is in a folder. Raises: OSError: it cannot be read.

    Names come first, then journals, then the manifest. A journal is written before the data of its save and
    goes after it: data that is named without a journal is of a save that has ended, and is the checkpoint's,
    if the manifest that is read afterwards says so. That is asked for by name, for a listing may lag behind.
    """
    content = Content(store.names())
    for name in content.names:
        if SAVING.fullmatch(name):
            content.journals[name] = _read_journal(store, name)
    if NAME in content.names or store.has(NAME):
        content.committed = True
        _look_at_manifest(store, content)
    return content


def is_committed(store: Store, save: str) -> bool:
    """Whether this save is the checkpoint. Raises: OSError, CheckpointError: its manifest cannot be read."""
    content = look(store)
    if content.unreadable:
        raise CheckpointError(f"{store.place}: its manifest cannot be read")
    return content.manifest is not None and content.manifest.id == save


def _look_at_manifest(store: Store, content: Content) -> None:
    if store.size(NAME) is None:
        return  # a link, a folder: nothing that this library writes
    text, content.redo = text_that_counts(store)
    with contextlib.suppress(CheckpointError):
        content.manifest = Head.parse(text)
    content.legacy = () if text.startswith(PREFIX) else legacy.files_of(text)
    ours = text.startswith(PREFIX) or bool(content.legacy)
    # Beside a damaged manifest a data file says of itself that this library wrote it.
    content.recognised = ours or any(wrote(store, n) for n in content.names if DATA.fullmatch(n))


def wrote(store: Store, name: str) -> bool:
    """Whether the header of a data file says that this library wrote it, in the save of its name."""
    found = DATA.fullmatch(name)
    return found is not None and says(store, name, metadata_text(found[1]))


def says(store: Store, name: str, text: bytes) -> bool:
    """Whether a text stands at the beginning of a file, where headers have their metadata."""
    with contextlib.suppress(OSError, EOFError):
        file = store.open(name)
        try:
            start = bytearray(min(200, file.size))
            file.read_into([memoryview(start)], 0)
        finally:
            file.close()
        return text in bytes(start)
    return False


def metadata(save: str) -> dict[str, str]:
    """What the header of a data file says of its save."""
    return {"format": "shardwright", "save": save}


def metadata_text(save: str) -> bytes:
    """The same as it stands in the file."""
    return json.dumps(metadata(save), separators=(",", ":")).encode()


def _read_journal(store: Store, name: str) -> Journal | None:
    """The journal; None: it is not one, or was cut."""
    try:
        found = json.loads(store.read(name, _MOST_JOURNAL))
        replaces = tuple(found["replaces"])
        fits = found["format"] == _JOURNAL and name == f"saving-{found['id']}.json"
        if fits and all(isinstance(one, str) and _REPLACED.fullmatch(one) for one in replaces):
            return Journal(found["id"], replaces, Owner.parse(found.get("owner")))
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def leftovers(store: Store, content: Content, mine: str = "", *, alone: bool = True) -> Iterator[str]:
    """Names that an interrupted save or removal left and that are proven to be ours; journals come last.

    Args:
        mine: the save of this process, of which nothing needs to be proven.
        alone: whether no other save can be under way; else only what belongs to `mine` is named, and in
            object storage what belongs to saves that have provably ended.
    """
    if content.unreadable:
        # Which of the files are its own cannot be known before another one takes its place.
        yield from (name for name in content.names if mine and f"-{mine}" in name)
        return
    here, now = set(content.names), content.manifest.id if content.manifest else ""
    kept = {*content.replaceable, NAME, content.redo}
    journals = {n: one for n, one in content.journals.items() if alone or _is_over(store, n, one, mine)}
    known = {one.id for one in journals.values() if one is not None} | {mine}
    for name in content.names:
        found = DATA.fullmatch(name) or NEW.fullmatch(name)
        left = found and (found[1] != now or NEW.fullmatch(name)) and name not in kept
        if found and left and (found[1] in known or _is_orphan(store, content, name, found[1], alone)):
            yield name
    for journal in journals.values():
        if journal is not None and journal.id == now:
            yield from (name for name in journal.replaces if name in here and name not in kept)
    yield from _cut(store, content, alone)
    yield from (n for n, journal in journals.items() if journal or n == f"saving-{mine}.json")


def _is_over(store: Store, name: str, journal: Journal | None, mine: str) -> bool:
    over = not store.renames and journal is not None and journal.ended
    return over or name == f"saving-{mine}.json"


def _is_orphan(store: Store, content: Content, name: str, save: str, alone: bool) -> bool:
    """Whether what says of itself that it is ours has no journal that could be of a save under way."""
    unclaimed = alone or (not store.renames and f"saving-{save}.json" not in content.names)
    return unclaimed and (wrote(store, name) or (bool(NEW.fullmatch(name)) and _begins(store, name, PREFIX)))


def _cut(store: Store, content: Content, alone: bool) -> Iterator[str]:
    """Files of our names that a crash left with a part of their text, or none: nothing is lost with them.

    A journal of object storage may be one that is just being written, so there only a cut text goes that
    nobody can be writing: that of a save with a whole journal, or of a removal.
    """
    for name in content.names:
        journal = SAVING.fullmatch(name)
        start = b"" if journal is None else json.dumps({"format": _JOURNAL, "id": journal[1]}).encode()[:-1]
        removal = not store.renames and REMOVING.fullmatch(name) and content.committed
        if (
            (journal and alone and content.journals[name] is None and _begins(store, name, start))
            or (alone and NEW.fullmatch(name) and store.size(name) == 0)
            or (removal and _begins(store, name, PREFIX))
        ):
            yield name


def _begins(store: Store, name: str, start: bytes) -> bool:
    """Whether a file begins like a text of ours, or ends before it could differ."""
    size = store.size(name)
    if size is None or size > _MOST_JOURNAL:
        return False
    with contextlib.suppress(OSError, EOFError):
        text = store.read(name, _MOST_JOURNAL)
        return text.startswith(start) or start.startswith(text)
    return False
