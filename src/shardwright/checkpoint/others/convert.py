"""Checkpoints of others, written anew as ones of this library: torch's, and those of its first format."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwright.checkpoint.library import library_version
from shardwright.checkpoint.others import first_format
from shardwright.checkpoint.storage import dcp, disk
from shardwright.checkpoint.storage.commit import Saving
from shardwright.checkpoint.storage.element_types import name_of
from shardwright.checkpoint.storage.folder_names import metadata
from shardwright.checkpoint.storage.manifest import VERSION, Manifest, dump
from shardwright.checkpoint.storage.proof import prove
from shardwright.checkpoint.storage.sums import CHUNK
from shardwright.checkpoint.storage.values import encode
from shardwright.checkpoint.storage.writer import Entry, into_files, write_file
from shardwright.errors import CheckpointError

_DOT = re.compile(r"model\.")


def model_key(name: str) -> str:
    """`model/weight` for `model.weight` and for `weight`: what `save(path, model)` would call it."""
    return f"model/{_DOT.sub('', name, count=1) if _DOT.match(name) else name}"


def convert(source: Path | str, target: Path | str, *, key: Callable[[str], str] | None = None) -> Path:
    """Write what another program saved as a checkpoint that `load` reads onto any mesh.

    Args:
        source: a folder of torch's distributed checkpoint, a checkpoint of the first format of this library
            (with its optimizer; generators start anew), or a file of `torch.save` with dicts of tensors.
        target: the new checkpoint's folder.
        key: from a name there (levels joined by dots) to a key here; None: all are a model's.
    Returns: `target`.
    Raises: CheckpointError: the source is damaged, holds what could only be executed, or two names get one
    key.
    Cost: one process reads and writes it, one box in memory at a time. Nothing of the source is executed.
    """
    source, target = Path(source), Path(target)
    old = first_format.read(source)
    found = _of_folder(source) if source.is_dir() else _of_file(source)
    key = key or (model_key if old is None else first_format.key)
    tensors: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    entries: list[Entry] = []
    for name, one in found:
        path = key(name)
        if path in tensors or path in values:
            raise CheckpointError(f"{source}: {name} and another one would both be called {path}")
        if isinstance(one, _Tensor):
            tensors[path] = {"dtype": one.dtype, "shape": one.shape, "layout": None, "parts": []}
            entries += [Entry(path, one.dtype, (at, n), n == one.shape, get) for at, n, get in one.boxes]
        else:
            values[path] = encode(one, path)
    about: dict[str, Any] = {"world": 1, "step": None, "config": {}, "ties": {}}
    about |= {"modules": ["model"], "optimizers": {}}
    if old is not None:
        about |= first_format.describe(old, tensors, values)
    return _write(target, {**about, "tensors": tensors, "values": values}, entries)


class _Tensor:
    """A tensor of the source: boxes that are read when they are written."""

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        boxes: list[tuple[tuple[int, ...], tuple[int, ...], Callable[[], torch.Tensor]]],
    ) -> None:
        self.dtype, self.shape, self.boxes = dtype, shape, boxes


def _of_folder(source: Path) -> Iterator[tuple[str, Any]]:
    folder = dcp.read_index(source)
    for name, (dtype, shape, pieces) in folder.tensors.items():
        boxes = [(one.offset, one.size, partial(dcp.read_piece, folder, name, one)) for one in pieces]
        yield name, _Tensor(dtype, shape, list(boxes))
    for name, place in folder.objects.items():
        yield name, dcp.read_object(folder, place)


def _of_file(source: Path) -> Iterator[tuple[str, Any]]:
    try:
        os.close(disk.open_regular(source, links=True))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror or error}") from None
    try:
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  a pickle that somebody made to harm may raise anything
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{source} cannot be read without executing it: {reason}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{source} holds a {type(found).__name__}, not a dict of tensors")
    yield from _flat("", found)


def _flat(prefix: str, found: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, one in found.items():
        path = f"{prefix}{name}"
        if isinstance(one, dict) and one and all(isinstance(key, str) for key in one):
            yield from _flat(f"{path}.", one)
        elif isinstance(one, torch.Tensor):
            shape = tuple(one.shape)
            whole = ((0,) * len(shape), shape, partial(torch.Tensor.detach, one))
            yield path, _Tensor(name_of(one.dtype), shape, [whole] if one.numel() else [])
        else:
            yield path, one


def _write(target: Path, about: dict[str, Any], entries: list[Entry]) -> Path:
    saving = Saving(target)
    try:
        written = [
            write_file(target / f"data-{saving.id}-00000-{number:03d}.safetensors", one, metadata(saving.id))
            for number, one in enumerate(into_files(entries))
        ]
        for number, file in enumerate(written):
            for path, (offset, size), at, sums in file.boxes:
                part = {"file": number, "at": at, "offset": offset, "size": size, "sums": sums}
                about["tensors"][path]["parts"].append(part)
        files = [{"name": f.name, "size": f.size, "header": f.header, "sum": f.sum} for f in written]
        body = {"format": "shardwright", "version": VERSION, "id": saving.id, "library": library_version()}
        text = dump({**body, "torch": torch.__version__, "chunk": CHUNK, "files": files, **about})
        prove(Manifest.parse(text))
        saving.commit(text, written)
    except BaseException:
        saving.abandon()
        raise
    return target
