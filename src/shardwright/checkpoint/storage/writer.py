"""A rank's files: a header in the safetensors format, then the boxes, one after another, as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from shardwright.checkpoint.pieces import Cell
from shardwright.checkpoint.storage.element_types import ITEMSIZES, in_file, in_order
from shardwright.checkpoint.storage.stores.store import NewFile, Store
from shardwright.checkpoint.storage.sums import Sums, sum_of
from shardwright.comm.dtype import as_bytes
from shardwright.errors import CheckpointError, reason_of

_STEP = 2 << 20  # stays in the processor's cache between checksum and write; a large page
_COPIED = 8 << 20
_SMALL = 1 << 16  # less than a chunk
_BLOCK = 1 << 20  # of neighbours that are written at once
_FILE_MOST = 8 << 30


@dataclass(frozen=True)
class Entry:
    """A box of a tensor to write: its elements, in any stride and on any device, or what makes them."""

    key: str
    dtype: str
    cell: Cell
    whole: bool
    elements: torch.Tensor | Callable[[], torch.Tensor]

    @property
    def view(self) -> torch.Tensor:
        """The elements; made anew each time where they are made."""
        return self.elements if isinstance(self.elements, torch.Tensor) else self.elements()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(prod(self.cell[1]) * ITEMSIZES[self.dtype])


@dataclass(frozen=True)
class Written:
    """A file that is on the disk: its name, size, header, and (key, cell, at, checksums) of each box."""

    name: str
    size: int
    header: int
    sum: str
    boxes: list[tuple[str, Cell, int, str]]


def into_files(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries of each file: the widest elements first, so that each begins where its type may."""
    files: list[list[Entry]] = []
    room = 0
    for entry in sorted(entries, key=lambda one: -min(ITEMSIZES[one.dtype], 8)):
        if not files or room < entry.nbytes:
            files.append([])
            room = _FILE_MOST
        files[-1].append(entry)
        room -= entry.nbytes
    return files


def header_of(entries: Sequence[Entry], metadata: dict[str, str]) -> bytes:
    """The header of a file of the safetensors format: 8 bytes of length, then JSON, to a multiple of 8."""
    described: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for entry in entries:
        dtype, shape = in_file(entry.dtype, entry.cell[1])
        name = _name(entry, described)
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _name(entry: Entry, taken: dict[str, Any]) -> str:
    name = entry.key if entry.whole else f"{entry.key}@{','.join(map(str, entry.cell[0]))}"
    while name in taken:
        name += "@"
    return name


def write_file(store: Store, name: str, entries: Sequence[Entry], metadata: dict[str, str]) -> Written:
    """Write one file and wait until it is where it stays.

    Raises: CheckpointError: the disk refuses; the file and the reason are named.
    Cost: memory for small tensors (1 MiB), and for copies of 8 MiB of those that do not lie on the CPU in one
    piece.
    """
    header = header_of(entries, metadata)
    try:
        file = store.create(name)
        try:
            steps = _Steps(file)
            steps.append(memoryview(header))
            boxes = _write_entries(steps, entries)
            steps.write()
        except BaseException:
            file.give_up()
            raise
        file.finish()
    except OSError as error:
        raise CheckpointError(f"{store.place / name} cannot be written: {reason_of(error)}") from None
    return Written(name, steps.at, len(header), sum_of(header), boxes)


class _Steps:
    """What is appended to a file, written in steps that end where a large page of the file does.

    What is written at once the system can cache as one page, and a load that maps it then has one entry of
    the page table to make in place of 512. `at` is where the next byte will stand.
    """

    def __init__(self, file: NewFile) -> None:
        self._file, self.at = file, 0
        self._waiting: list[memoryview] = []  # at most a step; none is of less than a block or `_SMALL`

    def append(self, data: memoryview, sums: Sums | None = None) -> None:
        """Append, and checksum while it is in the cache."""
        while data:
            step = data[: _STEP - self.at % _STEP]
            if sums is not None:
                sums.feed(step)
            self._waiting.append(step)
            data, self.at = data[len(step) :], self.at + len(step)
            if not self.at % _STEP:
                self.write()

    def write(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, []
        self._file.write(waiting)


def _write_entries(file: _Steps, entries: Sequence[Entry]) -> list[tuple[str, Cell, int, str]]:
    boxes: list[tuple[str, Cell, int, str]] = []
    small: list[tuple[Entry, torch.Tensor]] = []
    waiting = 0
    for entry in entries:
        nbytes = entry.nbytes
        if nbytes <= _SMALL:
            small.append((entry, entry.view))
            waiting += nbytes
            if waiting <= _BLOCK:
                continue
        _write_small(file, small, boxes)
        small, waiting = [], 0
        if nbytes > _SMALL:
            at, sums = file.at, Sums()
            for block in blocks(entry.view):
                file.append(block, sums)
            boxes.append((entry.key, entry.cell, at, sums.text))
    _write_small(file, small, boxes)
    return boxes


def _write_small(
    file: _Steps, small: list[tuple[Entry, torch.Tensor]], boxes: list[tuple[str, Cell, int, str]]
) -> None:
    """Append neighbours as one piece."""
    data = _bytes_of_all([view for _, view in small])
    low = 0
    for entry, view in small:
        high = low + view.nbytes
        boxes.append((entry.key, entry.cell, file.at + low, sum_of(data[low:high])))
        low = high
    file.append(data)


def _bytes_of_all(views: Sequence[torch.Tensor]) -> memoryview:
    """The bytes of small tensors, one after another, in new memory."""
    flat = [as_bytes(in_order(view.detach().cpu().resolve_conj().resolve_neg())) for view in views]
    return torch.cat(flat).numpy().data if flat else memoryview(b"")


def blocks(view: torch.Tensor, most: int = _COPIED) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major: in one piece where they lie so, else in copies of about `most`."""
    if (view.is_contiguous() and view.device.type == "cpu") or view.nbytes <= most or view.dim() == 0:
        yield bytes_of(view)
        return
    rows = max(1, most * view.shape[0] // view.nbytes)
    for part in view.split(rows):
        if rows == 1 and part.nbytes > most:
            yield from blocks(part[0], most)
        else:
            yield bytes_of(part)


def bytes_of(view: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major; the memory is the tensor's own where it lies so on the CPU."""
    plain = in_order(view.cpu().resolve_conj().resolve_neg())
    return as_bytes(plain).numpy().data
