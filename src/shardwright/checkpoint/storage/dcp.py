"""Folders of torch's distributed checkpoint, read without running what their pickles say.

The index is a pickle. It is read by an unpickler that knows a dozen names and makes inert records of them;
any other name is an error. Tensors are read by `torch.load(weights_only=True)`, one box at a time.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.element_types import DTYPES
from shardwright.checkpoint.storage.proof import why_not_once
from shardwright.errors import CheckpointError, words_of

INDEX = ".metadata"
_MOST = 1 << 30
_WHY = re.compile(r"WeightsUnpickler error:\s*(.+)")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_METADATA = "torch.distributed.checkpoint.metadata"


class Piece(NamedTuple):
    """A box of a tensor, and where its pickle stands."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    at: int
    length: int


class Folder(NamedTuple):
    """What an index says.

    Args: objects: name -> where its pickle stands. steps: name -> the keys of the nested dicts and lists that
        lead to it; empty where they were not nested.
    """

    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...], list[Piece]]]
    objects: dict[str, tuple[str, int, int]]
    steps: dict[str, tuple[str | int, ...]]


class _Record:
    """An object of the index: what it was made with and what it holds; nothing of it runs."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *(
        (_METADATA, name)
        for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta")
    ),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """A record for each known name. Raises: UnpicklingError: any other name."""
        if (module, name) in _KNOWN:
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in DTYPES:
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint needs")


def read_index(path: Path) -> Folder:
    """What a folder of torch's distributed checkpoint holds.

    Raises: CheckpointError: there is none, it names something that an index does not need, it contradicts
    itself, or a tensor is not stored exactly once.
    """
    try:
        found = _Unpickler(io.BytesIO(disk.read_small(path / INDEX, _MOST))).load()
        folder = _folder(path, found)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  a pickle that somebody made to harm may raise anything
        raise CheckpointError(f"{path / INDEX} cannot be read: {words_of(error)}") from None
    for name, (_, shape, pieces) in folder.tensors.items():
        reason = why_not_once(shape, tuple((piece.offset, piece.size) for piece in pieces))
        if reason:
            raise CheckpointError(f"{path}: {name}: {reason}")
    return folder


def _folder(path: Path, found: Any) -> Folder:
    places: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    for index, info in found.state["storage_data"].items():
        offset = index.state.get("offset")
        places[index.state["fqn"], None if offset is None else _sizes(offset)] = _place(info.state)
    folder = Folder(path, {}, {}, _steps(found.state.get("planner_data")))
    for name, one in found.state["state_dict_metadata"].items():
        if type(one).__name__ == "BytesStorageMetadata":
            folder.objects[name] = places[name, None]
            continue
        dtype = one.state["properties"].state[0]
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name} is of the type {dtype!r}, which is not known here")
        pieces = []
        for chunk in one.state["chunks"]:
            offset, size = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            if 0 not in size:
                pieces.append(Piece(offset, size, *places[name, offset]))
        folder.tensors[name] = (dtype, _sizes(one.state["size"]), pieces)
    return folder


def _steps(told: Any) -> dict[str, tuple[str | int, ...]]:
    found = dict(told or {})
    for name, steps in found.items():
        if not (type(name) is str and type(steps) is tuple and {type(step) for step in steps} <= {str, int}):
            raise CheckpointError(f"{name!r} is at {steps!r}, which is no place in nested dicts")
    return found


def _place(info: dict[str, Any]) -> tuple[str, int, int]:
    name, at, length = info["relative_path"], info["offset"], info["length"]
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise CheckpointError(f"{name!r} is no name of a file in the folder")
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{name} is transformed ({info['transform_descriptors']}), which is not read here"
        )
    _sizes((at, length))
    return name, at, length


def _sizes(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if any(type(n) is not int or n < 0 for n in found):
        raise CheckpointError(f"{found} are no sizes")
    return found


def read_object(folder: Folder, name: str, place: tuple[str, int, int]) -> Any:
    """What stands at a place, by torch's own restricted unpickler.

    Raises: CheckpointError: it is damaged, or would run something.
    """
    file, at, length = place
    path = folder.path / file
    try:
        handle = disk.open_regular(path)
        try:
            if at + length > os.fstat(handle).st_size:
                raise EOFError(f"it ends before byte {at + length}")
            data = bytearray(length)
            disk.read_into(handle, [memoryview(data)], at)
        finally:
            os.close(handle)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  a pickle that somebody made to harm may raise anything
        where = f"{name} ({path}, bytes {at} to {at + length})"
        raise CheckpointError(f"{where} cannot be read: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Of what torch says where it does not read a pickle, the line that says why."""
    found = _WHY.search(str(error))
    why = (found[1] if found else str(error) or type(error).__name__).partition("\n")[0].partition(". ")[0]
    allows = "; what you trust, torch.serialization.add_safe_globals([...]) allows for this process"
    return f"{why}{allows}" if "Unsupported global" in why else why


def read_piece(folder: Folder, name: str, piece: Piece) -> torch.Tensor:
    """A box of a tensor. Raises: CheckpointError: it is not what the index says."""
    dtype, _, _ = folder.tensors[name]
    found = read_object(folder, name, (piece.file, piece.at, piece.length))
    if not isinstance(found, torch.Tensor) or (tuple(found.shape), found.dtype) != (
        piece.size,
        DTYPES[dtype],
    ):
        raise CheckpointError(
            f"{folder.path / piece.file}: {name} is not the {dtype}{list(piece.size)} it should be"
        )
    return found.detach()
