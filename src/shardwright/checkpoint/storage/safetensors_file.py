"""The header of a file of the safetensors format, read as text that anybody may have written."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.element_types import ITEMSIZES, from_file
from shardwright.errors import CheckpointError, reason_of

_MOST = 100_000_000  # of a header, as the format says


class Place(NamedTuple):
    """A tensor of a file: our name of its dtype, its shape, its first byte in the file, how many there are.

    A dtype that is not known here is in quotes, as the file calls it: only whoever asks for it is refused.
    """

    dtype: str
    shape: tuple[int, ...]
    at: int
    nbytes: int


def read_header(path: Path) -> tuple[int, dict[str, Place]]:
    """The size of a file, and its tensors by name.

    Raises: CheckpointError: it is no such file, or it contradicts itself; nothing of it was used.
    """
    try:
        handle = disk.open_regular(path, links=True)
        try:
            return _read(handle)
        finally:
            os.close(handle)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no file of the safetensors format, or damaged: {error}") from None


def _read(handle: int) -> tuple[int, dict[str, Place]]:
    size = os.fstat(handle).st_size
    first = bytearray(8)
    disk.read_into(handle, [memoryview(first)], 0)
    length = int.from_bytes(first, "little")
    if length > min(_MOST, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    text = bytearray(length)
    disk.read_into(handle, [memoryview(text)], 8)
    entries = json.loads(bytes(text), object_pairs_hook=once)
    entries.pop("__metadata__", None)
    places = {name: _place(name, entry, 8 + length) for name, entry in entries.items()}
    _check(places, 8 + length, size)
    return size, places


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What JSON says, of which a parser would keep the last. Raises: ValueError: a name stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"it names {twice!r} twice")
    return found


def _place(name: str, entry: dict[str, Any], start: int) -> Place:
    written, shape = entry["dtype"], tuple(entry["shape"])
    low, high = entry["data_offsets"]
    sizes = (*shape, low, high, high - low)
    if type(written) is not str or any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"{name}: sizes that are none")
    dtype = from_file(written)
    if dtype is not None and high - low != prod(shape) * ITEMSIZES[dtype]:
        raise ValueError(f"{name}: {dtype}{list(shape)} in {high - low} bytes")
    return Place(dtype or repr(written), shape, start + low, high - low)


def _check(places: dict[str, Place], start: int, size: int) -> None:
    for name, place in sorted(places.items(), key=lambda one: one[1].at):
        if place.nbytes and place.at != start:
            raise ValueError(f"{name} begins at byte {place.at}, what is before it ends at {start}")
        start += place.nbytes
    if start != size:
        raise ValueError(f"{size} bytes, of which {start} are accounted for")
