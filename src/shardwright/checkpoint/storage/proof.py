"""The proof that each element of each tensor is stored exactly once, and that each byte of each file is read.

Integers only: boxes of a tensor that lie in it, do not overlap and have as many elements as it, are it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from shardwright.checkpoint.pieces import Cell, Shape
from shardwright.checkpoint.storage.element_types import ITEMSIZES
from shardwright.checkpoint.storage.manifest import LIMIT, Manifest, SavedTensor, read_manifest
from shardwright.checkpoint.storage.place import Place
from shardwright.checkpoint.storage.sums import digits_for
from shardwright.errors import CheckpointError
from shardwright.remember import remembered

_MOST_DIMS = 64
_MANY = 64  # boxes
_GRID_DIMS, _GRID_CELLS = 4, 1 << 22
_FILE = re.compile(r"data-([0-9a-f]{16})-[0-9]{5,}-[0-9]{3,}\.safetensors")


@remembered(4096)
def why_not_once(shape: Shape, boxes: tuple[Cell, ...]) -> str:
    """Why these boxes are not each element of the tensor exactly once; empty if they are."""
    for offset, size in boxes:
        fits = len(offset) == len(size) == len(shape)
        if not fits or any(o + s > n for o, s, n in zip(offset, size, shape, strict=True)):
            return f"the box at {list(offset)} of {list(size)} is not inside {list(shape)}"
    twice = _overlap(shape, boxes)
    if twice is not None:
        return f"elements of the boxes at {list(twice[0])} and {list(twice[1])} are stored twice"
    missing = prod(shape) - sum(prod(size) for _, size in boxes)
    return f"{missing} of {prod(shape)} elements are not stored" if missing else ""


def _overlap(shape: Shape, boxes: Sequence[Cell]) -> tuple[Shape, Shape] | None:
    """The offsets of two boxes that share elements; None: there are none.

    A sweep along the dim in which the boxes have the most places: only those that meet there are compared.
    Of many, most often none do, which a count in the grid of their ends says sooner.
    """
    if len(boxes) < 2 or (len(boxes) > _MANY and max(shape, default=0) < LIMIT and _are_apart(boxes)):
        return None
    dims = range(len(shape))
    dim = max(dims, key=lambda d: len({offset[d] for offset, _ in boxes}), default=0)
    if not shape:
        return boxes[0][0], boxes[1][0]
    reached: list[Cell] = []
    start = -1
    for offset, size in sorted((box for box in boxes if prod(box[1])), key=lambda box: box[0][dim]):
        if offset[dim] != start:
            start = offset[dim]
            reached = [box for box in reached if box[0][dim] + box[1][dim] > start]
        for other, extent in reached:
            if all(offset[d] < other[d] + extent[d] and other[d] < offset[d] + size[d] for d in dims):
                return other, offset
        reached.append((offset, size))
    return None


def _are_apart(boxes: Sequence[Cell]) -> bool:
    """Whether no cell of the grid that the ends of boxes make is in two; False also where that is too large.

    Each box counts up at its corners, so that running sums along each dim give how often a cell is in one.
    """
    low, size = (np.array(one, dtype=np.int64) for one in zip(*boxes, strict=True))
    low, size = (one[size.all(axis=1)] for one in (low, size))
    ends = [low, low + size]
    cuts = [np.unique(one) for one in np.concatenate(ends).T]
    dims = [dim for dim, cut in enumerate(cuts) if len(cut) > 2]  # in the others all boxes are as long
    if len(dims) > _GRID_DIMS or prod(len(cuts[dim]) for dim in dims) > _GRID_CELLS:
        return False
    counts = np.zeros([len(cuts[dim]) for dim in dims], dtype=np.int32)
    for corner in product((0, 1), repeat=len(dims)):
        where = tuple(np.searchsorted(cuts[d], ends[end][:, d]) for d, end in zip(dims, corner, strict=True))
        np.add.at(counts, where, (-1) ** sum(corner))
    for axis in range(len(dims)):
        np.cumsum(counts, axis=axis, out=counts)
    return bool(counts.max(initial=0) <= 1)


def proven(path: Place | str) -> Manifest:
    """The manifest of the checkpoint at `path`, which does not contradict itself.

    Raises: CheckpointError: it does, or as `read_manifest`.
    """
    manifest = read_manifest(path)
    try:
        prove(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: its manifest is wrong: {error}") from None
    return manifest


def prove(manifest: Manifest) -> None:
    """Raises CheckpointError, with the tensor or the file named, where the manifest contradicts itself."""
    _prove_files(manifest)
    places: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for key, tensor in manifest.tensors.items():
        _prove_tensor(manifest, key, tensor, places)
    for file, used in zip(manifest.files, places, strict=True):
        at, last = file.header, "its header"
        for start, end, key in sorted(used):
            if start != at:
                raise CheckpointError(f"{file.name}: {key} begins at byte {start}, {last} ends at {at}")
            at, last = end, key
        if at != file.size:
            raise CheckpointError(f"{file.name}: {file.size} bytes, of which {at} are accounted for")
    _prove_names(manifest)


def _prove_files(manifest: Manifest) -> None:
    seen: set[str] = set()
    for file in manifest.files:
        found = _FILE.fullmatch(file.name)
        if found is None or found[1] != manifest.id or file.name in seen:
            raise CheckpointError(f"{file.name!r} is no name of a file of save {manifest.id}")
        seen.add(file.name)


def _prove_tensor(
    manifest: Manifest, key: str, tensor: SavedTensor, places: list[list[tuple[int, int, str]]]
) -> None:
    itemsize = ITEMSIZES.get(tensor.dtype)
    if itemsize is None:
        raise CheckpointError(f"{key}: elements of type {tensor.dtype!r:.60} are not known here")
    if len(tensor.shape) > _MOST_DIMS:
        raise CheckpointError(f"{key}: it has {len(tensor.shape)} dims, at most {_MOST_DIMS} are read")
    reason = why_not_once(tensor.shape, tuple([(part.offset, part.size) for part in tensor.parts]))
    if reason:
        raise CheckpointError(f"{key}: {reason}")
    for part in tensor.parts:
        nbytes = prod(part.size) * itemsize
        if part.file >= len(places) or not nbytes:
            raise CheckpointError(f"{key}: the box at {list(part.offset)} is in no file")
        if len(part.sums) != digits_for(nbytes, manifest.chunk):
            raise CheckpointError(f"{key}: the box at {list(part.offset)} lacks checksums")
        places[part.file].append((part.at, part.at + nbytes, key))


def _prove_names(manifest: Manifest) -> None:
    for name, first in manifest.ties.items():
        if name in manifest.tensors or first not in manifest.tensors:
            raise CheckpointError(f"{name} is said to be tied to {first}, which is no tensor")
