"""The manifest: what a checkpoint holds and where each element is. It is written last."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Annotated, Any, Literal, Self, TypeVar

import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shardwright.checkpoint.storage import legacy
from shardwright.checkpoint.storage.place import Place, place_of
from shardwright.checkpoint.storage.stores.of import store_of
from shardwright.checkpoint.storage.stores.store import Store
from shardwright.errors import CheckpointError, reason_of

NAME = "manifest.json"
_INDEX_OF_TORCH = ".metadata"
VERSION = 2
PREFIX = b'{"shardwright": "checkpoint", "checksum": "'
_BETWEEN = b'",\n"manifest": '
_END = b"}\n"
_DIGITS = 32
_MOST = 1 << 30
NEW = re.compile(r"manifest-([0-9a-f]{16})\.new")
_VERSION = re.compile(rb'"version":\s*(\d{1,9})')
_LIBRARY = re.compile(rb'"library":\s*"([^"]{1,40})"')

T = TypeVar("T", bound=BaseModel)
LIMIT = 1 << 62  # of whole numbers in a manifest, which readers in other languages hold too
Natural = Annotated[int, Field(ge=0, lt=LIMIT)]
Sizes = tuple[Natural, ...]
Id = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def library_version() -> str:
    """The version that the running source says of itself (what is installed may be another)."""
    return str(sys.modules["shardwright"].__version__)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SavedPart(_Entry):
    """A box of a tensor: row-major from byte `at` of file number `file` on.

    Args: sums: the checksum of each chunk of it, 16 hex digits each.
    """

    file: Natural
    at: Natural
    offset: Sizes
    size: Sizes
    sums: str


class SavedTensor(_Entry):
    """What a tensor is whatever its layout, and where its elements are.

    Args: layout: how it lay when it was saved, for people; None: it was a plain tensor.
    """

    dtype: str
    shape: Sizes
    layout: str | None = None
    parts: tuple[SavedPart, ...] = ()

    @property
    def distributed(self) -> bool:
        """Whether it was a DTensor."""
        return self.layout is not None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _with_names(group: dict[str, Any]) -> dict[str, Any]:
    names = group.get("params", [])
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError("params are no names")
    return group


class SavedOptimizer(_Entry):
    """An optimizer but for its tensors, which are `<its name>/<parameter>/<state>` among the others.

    Args: kind: its class. groups: the settings of each, `params` by name. values: parameter -> state ->
    value.
    """

    kind: str
    groups: tuple[Annotated[dict[str, Any], AfterValidator(_with_names)], ...]
    values: dict[str, dict[str, Any]]


class SavedFile(_Entry):
    """Name and size of a file, size and checksum of its header."""

    name: Annotated[str, Field(max_length=255)]  # of which no file has more
    size: Natural
    header: Natural
    sum: str


class Manifest(_Entry):
    """Everything about a checkpoint but its data."""

    format: Literal["shardwright"] = "shardwright"
    version: Natural = VERSION
    id: Id
    library: str
    torch: str
    world: Natural
    step: Natural | None
    config: dict[str, Any]
    chunk: Annotated[int, Field(ge=1 << 10, le=1 << 30)]
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]
    ties: dict[str, str]
    modules: tuple[str, ...]
    optimizers: dict[str, SavedOptimizer]
    values: dict[str, Any]

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """The manifest with this text.

        Raises: CheckpointError: the text is damaged, or a newer library wrote it.
        """
        return _parsed(cls, text)


class Head(BaseModel):
    """Of a manifest the little that says which files are its own."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    id: Id
    files: tuple[SavedFile, ...]

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """The head of the manifest with this text. Raises: CheckpointError: as for `Manifest.parse`."""
        return _parsed(cls, text)


def _parsed(kind: type[T], text: bytes) -> T:
    body = _body(text)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:6]))
        raise CheckpointError(f"its manifest cannot be read ({place or 'text'}: {first['msg']})") from None


def dump(body: dict[str, Any]) -> bytes:
    """The text of the manifest file, with a checksum of itself.

    Raises: CheckpointError: it is longer than what is read of a manifest, so that nobody could load it.
    """
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > _MOST - 100:  # what stands around it is less
        raise CheckpointError(
            f"the manifest would have {len(text)} bytes, and {_MOST} are read: large values stand in it as "
            "text, so give them as tensors (torch.from_numpy, torch.frombuffer)"
        )
    return PREFIX + _checksum(text) + _BETWEEN + text + _END


def _checksum(text: bytes) -> bytes:
    return str(xxhash.xxh3_128_hexdigest(text)).encode()


def _body(text: bytes) -> bytes:
    start = len(PREFIX) + _DIGITS + len(_BETWEEN)
    stored, body = text[len(PREFIX) : len(PREFIX) + _DIGITS], text[start : -len(_END)]
    whole = text.startswith(PREFIX) and text.endswith(_END) and text[:start].endswith(_BETWEEN)
    if whole and stored == _checksum(body):
        _refuse_newer(body)
        return body
    if legacy.manifest_of(text) is not None:
        raise CheckpointError(
            "it is of version 1, which is made of pickles: `shardwright checkpoint convert OLD NEW` writes "
            "it anew without executing anything, then load the new one"
        )
    if text.startswith(PREFIX):
        _refuse_newer(text[:1000])
        cut = "" if text.endswith(_END) else " (it ends too early)"
        raise CheckpointError(f"its manifest has been changed or damaged{cut}")
    raise CheckpointError("its manifest cannot be read (it is not of this library, or damaged at its start)")


def _refuse_newer(body: bytes) -> None:
    """Raises CheckpointError for a version that this library does not know."""
    found = _VERSION.search(body[:1000])
    if found is not None and int(found[1]) > VERSION:
        library = _LIBRARY.search(body[:1000])
        by = library[1].decode(errors="replace") if library else "of a later version"
        raise CheckpointError(
            f"its format is version {int(found[1])}, this library reads up to version {VERSION}: "
            f"use shardwright {by}"
        )


def read_manifest(path: Place | str) -> Manifest:
    """The manifest of the checkpoint at `path`; its data is not looked at.

    Raises: CheckpointError: there is no checkpoint, it was never finished, or its manifest is damaged.
    """
    store = store_of(place_of(path))
    try:
        _check_finished(store)
        text, _ = text_that_counts(store)
    except (OSError, EOFError) as error:
        raise CheckpointError(
            f"{store.place} cannot be used: its manifest cannot be read ({reason_of(error)})"
        ) from None
    try:
        return Manifest.parse(text)
    except CheckpointError as error:
        raise CheckpointError(f"{store.place} cannot be used: {error}") from None


def text_that_counts(store: Store) -> tuple[bytes, str]:
    """The manifest's text; where it was cut, what it would have been, and the name under which that stands.

    Raises: OSError, EOFError: it cannot be read.
    """
    text = store.read(NAME, _MOST)
    while cut_short(store, text):
        whole, name = _of_a_cut_commit(store, text)
        if name:
            return whole, name
        now = store.read(NAME, _MOST)
        if now == text:
            break
        text = now  # another machine has finished that commit since
    return text, ""


def cut_short(store: Store, text: bytes) -> bool:
    """Whether a text that does not parse may be a manifest of ours that was still being written.

    Only where a name cannot change its file in one instant; there the same text stands whole under another
    name until all of it is written.
    """
    begins = text.startswith(PREFIX) or PREFIX.startswith(text)
    return not store.renames and begins and not text.endswith(_END)


def _of_a_cut_commit(store: Store, cut: bytes) -> tuple[bytes, str]:
    """The whole text that begins like the cut one, and whose files are all there; nothing: there is none.

    Several saves may have left theirs: the checksum at the start tells them apart, and where the cut came
    before it, one of which a later save removed the files is not what was being written.
    """
    for name in store.names():
        found = NEW.fullmatch(name)
        if found is None:
            continue
        with contextlib.suppress(OSError, EOFError, CheckpointError):
            text = store.read(name, _MOST)
            head = Head.parse(text)
            there = all(store.size(file.name) == file.size for file in head.files)
            if there and text.startswith(cut) and head.id == found[1]:
                return text, name
    return b"", ""


def _check_finished(store: Store) -> None:
    path = store.place
    if not store.exists():
        raise CheckpointError(f"{path} is not a checkpoint: there is no such folder")
    if not store.has(NAME):
        raise CheckpointError(f"{path} {_without_manifest(store)}")


def _without_manifest(store: Store) -> str:
    """What a folder is that holds no manifest, and what to do with it."""
    if store.has(_INDEX_OF_TORCH):
        return (
            "is a folder of torch's distributed checkpoint: `shardwright checkpoint convert OLD NEW` writes "
            "it as one of this library, then load the new one"
        )
    if any(one == "checkpoints" or one.startswith("step-") for one in store.folders()):
        return "is the folder of a run: name one of its checkpoints (`latest(folder)` is the newest)"
    if any(one.endswith(".safetensors") and not one.startswith("data-") for one in store.names()):
        return "holds safetensors files of another program: `load_hf` reads those of Hugging Face"
    return "has no manifest: it is no checkpoint, or was never finished (the run ended while it was written)"
