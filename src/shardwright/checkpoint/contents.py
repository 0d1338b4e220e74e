"""Look at checkpoints without a model: what is inside, whether it is as it was written, what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch

from shardwright.checkpoint.storage.element_types import DTYPES, ITEMSIZES
from shardwright.checkpoint.storage.manifest import Manifest, SavedTensor, read_manifest
from shardwright.checkpoint.storage.place import Place, place_of
from shardwright.checkpoint.storage.proof import proven
from shardwright.checkpoint.storage.reader import Reader, wants
from shardwright.checkpoint.storage.source import Source, check_sizes
from shardwright.checkpoint.storage.values import canonical
from shardwright.errors import CheckpointError, refuse_other_kind
from shardwright.index.region import Box

_BLOCK = 8 << 20
TRIES = 5  # of a checkpoint that others save to while it is read
T = TypeVar("T")
Told = Callable[[int], None]


class Difference(NamedTuple):
    """What is not alike in two checkpoints: a tensor or a value by its path, and how it differs."""

    path: str
    how: str


def bytes_of(tensor: SavedTensor) -> int:
    """Bytes of a tensor, stored once."""
    return int(prod(tensor.shape) * ITEMSIZES[tensor.dtype])


def open_checkpoint(path: Place | str) -> Manifest:
    """The manifest, proven, of a checkpoint whose files have the sizes that it says.

    Raises: CheckpointError: it is unfinished, contradicts itself, or a file is missing or short.
    """

    def sized(manifest: Manifest) -> Manifest:
        check_sizes(Source.of(place_of(path), manifest))
        return manifest

    return of_one_save(path, sized)


def of_one_save(path: Place | str, look: Callable[[Manifest], T]) -> T:
    """What is found of the checkpoint at a path; where a save replaces it meanwhile, of the new one.

    Raises: CheckpointError: of a manifest, or of what is still there after it.
    """
    for _ in range(TRIES):
        manifest = proven(path)
        try:
            return look(manifest)
        except CheckpointError:
            if read_manifest(path).id == manifest.id:
                raise
    return look(proven(path))


def verify(path: Place | str, told: Told = lambda _: None) -> int:
    """Read every byte of a checkpoint and compare it with its checksum; how many bytes that were.

    Args: told: is called with the bytes of each block, as they are read.
    Raises: CheckpointError: something is not as it was written; the file and the tensor are named.
    Cost: one process reads all of it, in blocks of 8 MiB.
    """
    _refuse_no_listener(told)
    return of_one_save(path, lambda manifest: _verified(Source.of(place_of(path), manifest), manifest, told))


def _verified(source: Source, manifest: Manifest, told: Told) -> int:
    check_sizes(source)
    reader = Reader(source)
    try:
        reader.check_headers(range(len(manifest.files)))
        for key, tensor in manifest.tensors.items():
            for block in _blocks(reader, key, tensor):
                told(block.nbytes)
    finally:
        reader.close()
    return reader.bytes_read


def diff(one: Place | str, other: Place | str, told: Told = lambda _: None) -> list[Difference]:
    """What differs between two checkpoints, whatever the layouts that wrote them; empty: they say the same.

    Raises: CheckpointError: one of them is damaged.
    Cost: reads the tensors that both have, in blocks of 8 MiB.
    """
    _refuse_no_listener(told)
    return of_one_save(one, lambda a: of_one_save(other, lambda b: _differing(one, other, a, b, told)))


def _differing(
    one: Place | str, other: Place | str, first: Manifest, second: Manifest, told: Told
) -> list[Difference]:
    sources = [Source.of(place_of(path), manifest) for path, manifest in ((one, first), (other, second))]
    for source in sources:
        check_sizes(source)
    found = [Difference(key, f"only in {one}") for key in first.tensors if key not in second.tensors]
    found += [Difference(key, f"only in {other}") for key in second.tensors if key not in first.tensors]
    readers = [Reader(source) for source in sources]
    try:
        for key in first.tensors:
            if key in second.tensors:
                found += _compared(key, readers, first.tensors[key], second.tensors[key], told)
    finally:
        for reader in readers:
            reader.close()
    return found + _said_otherwise(first, second)


def _refuse_no_listener(told: Told) -> None:
    refuse_other_kind("told", told, Callable, CheckpointError, fix="a function of a number of bytes")


def _said_otherwise(first: Manifest, second: Manifest) -> list[Difference]:
    """What two checkpoints say beside their tensors: values, settings of optimizers, ties."""
    found = []
    for what, one, other in (
        ("value", first.values, second.values),
        ("setting", _settings(first), _settings(second)),
        ("tie", first.ties, second.ties),
    ):
        for path in dict.fromkeys((*one, *other)):
            texts = [canonical(said[path]) if path in said else None for said in (one, other)]
            if texts[0] != texts[1]:
                found.append(Difference(path, f"another {what}"))
    return found


def _settings(manifest: Manifest) -> dict[str, Any]:
    return {
        f"{name}/{part}": value
        for name, optimizer in manifest.optimizers.items()
        for part, value in optimizer.model_dump().items()
    }


def _compared(
    key: str, readers: list[Reader], one: SavedTensor, other: SavedTensor, told: Told
) -> list[Difference]:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return [Difference(key, f"{one} and {other}")]
    differ = 0
    pairs = zip(_blocks(readers[0], key, one), _blocks(readers[1], key, other), strict=True)
    for mine, theirs in pairs:
        told(mine.nbytes)
        differ += int((mine.view(torch.uint8) != theirs.view(torch.uint8)).sum())
    return [Difference(key, f"{differ} of {bytes_of(one)} bytes differ")] if differ else []


def _blocks(reader: Reader, key: str, tensor: SavedTensor) -> Iterator[torch.Tensor]:
    """The elements of a tensor in row-major order, flat, in blocks of 8 MiB at most."""
    for box in _boxes(tensor):
        block = torch.empty(box.size, dtype=DTYPES[tensor.dtype], device="cpu")
        reader.read(wants(key, tensor, [(box, block)]))
        yield block.reshape(-1)


def _boxes(tensor: SavedTensor) -> Iterator[Box]:
    """Rows of the first dim of which one is no more than a block, for each index of the dims before it."""
    shape, size = tensor.shape, ITEMSIZES[tensor.dtype]
    if not shape:
        yield Box((), ())
    if not shape or not prod(shape):
        return
    dim = next((d for d in range(len(shape)) if size * prod(shape[d + 1 :]) <= _BLOCK), len(shape) - 1)
    inner, rest = shape[dim + 1 :], (0,) * (len(shape) - dim - 1)
    rows = max(1, _BLOCK // (size * prod(inner)))
    for outer in product(*map(range, shape[:dim])):
        for row in range(0, shape[dim], rows):
            yield Box((*outer, row, *rest), ((1,) * dim) + (min(rows, shape[dim] - row), *inner))
