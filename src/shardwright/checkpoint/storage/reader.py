"""Reading what is needed of a checkpoint: few large reads, each chunk checked as soon as it is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from shardwright.checkpoint.storage.element_types import DTYPES, ITEMSIZES
from shardwright.checkpoint.storage.manifest import SavedPart, SavedTensor
from shardwright.checkpoint.storage.pages import unless_cut_short
from shardwright.checkpoint.storage.source import Source, open_file
from shardwright.checkpoint.storage.stores.store import OpenFile
from shardwright.checkpoint.storage.sums import first_wrong, sum_of
from shardwright.comm.dtype import as_bytes
from shardwright.compat import foreach_copy_
from shardwright.errors import CheckpointError, reason_of
from shardwright.index.region import Box
from shardwright.index.stride import contiguous_stride

_SPAN = 8 << 20  # of a read whose elements are then picked out
_SMALL = 1 << 16
_FEW = 8  # parts of a tensor that are not worth a search
_BLOCK = 1 << 20  # of neighbours that are read at once
_SHORTER = "it became shorter while it was read"


class Want(NamedTuple):
    """Elements of a saved part that somebody needs: those of `low`, in the part's indices, of `view`'s shape.

    `view` is where they go: any stride, any device.
    """

    key: str
    part: SavedPart
    dtype: str
    low: tuple[int, ...]
    view: torch.Tensor


def wants(key: str, saved: SavedTensor, boxes: Sequence[tuple[Box, torch.Tensor]]) -> list[Want]:
    """What to read for boxes of a tensor: their meetings with the saved boxes."""
    parts, near = saved.parts, None
    if len(boxes) > 1 and len(parts) > _FEW:
        near = _Near(saved)
    found: list[Want] = []
    for box, view in boxes:
        found += _meetings(key, saved.dtype, parts if near is None else near.parts_at(box), box, view)
    return found


class _Near:
    """The parts of a tensor by where they are: those that a box may meet are found by where they begin."""

    def __init__(self, saved: SavedTensor) -> None:
        dim = max(range(len(saved.shape)), key=lambda d: len({part.offset[d] for part in saved.parts}))
        self._dim, self._parts = dim, sorted(saved.parts, key=lambda part: part.offset[dim])
        self._same = {(part.offset, part.size): part for part in self._parts}  # most are loaded as saved
        self._low = np.array([part.offset for part in self._parts], dtype=np.int64)
        size = np.array([part.size for part in self._parts], dtype=np.int64)
        self._high, self._longest = self._low + size, int(size[:, dim].max())

    def parts_at(self, box: Box) -> list[SavedPart]:
        """Those that share elements with a box."""
        if (same := self._same.get((box.offset, box.size))) is not None:
            return [same]
        start, end = box.offset[self._dim], box.offset[self._dim] + box.size[self._dim]
        first, last = np.searchsorted(self._low[:, self._dim], (start - self._longest + 1, end))
        before = self._low[first:last] < np.add(box.offset, box.size)
        met = (before & (self._high[first:last] > box.offset)).all(axis=1)
        return [self._parts[first + at] for at in np.flatnonzero(met)]


def _meetings(key: str, dtype: str, parts: Sequence[SavedPart], box: Box, view: torch.Tensor) -> list[Want]:
    for part in parts:  # most are loaded as they were saved
        if part.offset == box.offset and part.size == box.size:
            return [Want(key, part, dtype, (0,) * len(box.size), view)]
    return [want for part in parts if (want := _meeting(key, dtype, part, box, view)) is not None]


def _meeting(key: str, dtype: str, part: SavedPart, box: Box, view: torch.Tensor) -> Want | None:
    low = [max(a, b) for a, b in zip(part.offset, box.offset, strict=True)]
    ends = zip(part.offset, part.size, box.offset, box.size, strict=True)
    high = [min(a + n, b + m) for a, n, b, m in ends]
    if not all(a < b for a, b in zip(low, high, strict=True)):
        return None
    inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box.offset, strict=True))
    start = tuple(a - o for a, o in zip(low, part.offset, strict=True))
    return Want(key, part, dtype, start, view[inside])


Pair = tuple[list[torch.Tensor], list[torch.Tensor]]


class Reader:
    """The files of one source, open as long as they are read. `bytes_read` counts what was asked for."""

    def __init__(self, source: Source) -> None:
        self.path, self.source = source.path, source
        self.bytes_read = 0
        self._handles: dict[int, OpenFile] = {}
        self._scratch = memoryview(bytearray(0))

    def close(self) -> None:
        """Close all files."""
        for file in self._handles.values():
            file.close()
        self._handles.clear()

    def check_headers(self, numbers: Iterable[int]) -> None:
        """Compare the headers of these files. Raises: CheckpointError: one is not as it was written."""
        for number in numbers:
            file = self.source.files[number]
            data = memoryview(bytearray(file.header))
            self._read(number, [data], 0)
            if sum_of(data) != file.sum:
                raise CheckpointError(
                    self._damaged(number, "its header is not what was saved (wrong checksum)")
                )

    def read(self, wanted: Iterable[Want]) -> None:
        """Fill the views. Raises: CheckpointError: a file is missing, short or damaged; it is named."""
        small: list[Want] = []
        for want in sorted(wanted, key=_place):
            if is_small(want):
                small.append(want)
            else:
                self._picked(want)
        for views, found in self.read_apart(small):
            foreach_copy_(views, found)

    def read_apart(self, small: Iterable[Want]) -> Iterator[Pair]:
        """Wants that are `is_small`, read and checked: lists of views, and of what is to be copied to each.

        Neighbours in a file have one read and one block of memory. Raises: CheckpointError: as `read`.
        """
        run: list[Want] = []
        end, nbytes = (-1, "", -1), 0
        for want in sorted(small, key=_place):
            if (want.part.file, want.dtype, want.part.at) != end or nbytes > _BLOCK:
                if run:
                    yield self._read_run(run, nbytes)
                run, nbytes = [], 0
            run.append(want)
            nbytes += want.view.nbytes
            end = want.part.file, want.dtype, want.part.at + want.view.nbytes
        if run:
            yield self._read_run(run, nbytes)

    def _read_run(self, run: list[Want], nbytes: int) -> Pair:
        block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        memory = block.numpy().data
        self._read(run[0].part.file, [memory], run[0].part.at)
        at, views = 0, [want.view for want in run]
        for want, view in zip(run, views, strict=True):
            end = at + view.nbytes
            self._check(want, memory[at:end], 0)
            at = end
        flat = block.view(DTYPES[run[0].dtype]).split([view.numel() for view in views])
        return views, [one.view(view.shape) for one, view in zip(flat, views, strict=True)]

    def keep(self, wanted: Iterable[Want]) -> None:
        """Have the system keep in memory what `hold` will be asked for.

        Raises: CheckpointError: a file is missing, or has another size.
        """
        ranges: dict[int, list[tuple[int, int]]] = {}
        for want in wanted:
            if piece := self._piece(want):
                low, high = self._whole_chunks(want, *piece)
                ranges.setdefault(want.part.file, []).append((want.part.at + low, want.part.at + high))
        for number, found in ranges.items():
            self._handle(number).keep(found)

    def _piece(self, want: Want) -> tuple[int, int] | None:
        """Which bytes of its part a want is; None: they do not lie in one piece, or are few."""
        start, span, run = _extent(want.part.size, want.low, tuple(want.view.shape))
        if span != run or want.view.nbytes <= _SMALL or not _direct(want):
            return None
        low = start * ITEMSIZES[want.dtype]
        return low, low + want.view.nbytes

    def hold(self, want: Want) -> memoryview | None:
        """The bytes of a want, checked; in memory as long as they are used.

        None: they are not kept there (see `keep`); read them then. Raises: CheckpointError: as `read`.
        """
        piece = self._piece(want)
        if piece is None:
            return None
        low, high = piece
        first, last = self._whole_chunks(want, low, high)
        held = self._handle(want.part.file).hold(want.part.at + first, last - first)
        if held is None:
            return None
        try:
            with unless_cut_short(held):
                self._check(want, held, first)
        except EOFError:
            raise CheckpointError(self._damaged(want.part.file, _SHORTER)) from None
        self.bytes_read += len(held)
        return held[low - first : high - first]

    def check_held(self) -> None:
        """Raises CheckpointError where a file that is held has been cut short since it was opened."""
        for number, file in self._handles.items():
            if not file.is_whole():
                raise CheckpointError(self._damaged(number, _SHORTER))

    def _picked(self, want: Want) -> None:
        """Read one want: straight to its place, or by way of a scratch, in pieces of a bounded size."""
        size, item = tuple(want.view.shape), ITEMSIZES[want.dtype]
        start, span, run = _extent(want.part.size, want.low, size)
        if span == run and _direct(want):
            self._straight(want, start * item)
            return
        runs = prod(size) // run
        sparse = span * item > 2 * runs * (run * item + self.source.chunk)
        if (span * item <= _SPAN and not sparse) or not any(n > 1 for n in size):
            self._by_scratch(want, start * item, span * item)
            return
        dim = next(d for d, n in enumerate(size) if n > 1)
        rows = 1 if sparse else max(1, size[dim] * _SPAN // (span * item))
        for row in range(0, size[dim], rows):
            count = min(rows, size[dim] - row)
            low = (*want.low[:dim], want.low[dim] + row, *want.low[dim + 1 :])
            self._picked(want._replace(low=low, view=want.view.narrow(dim, row, count)))

    def _straight(self, want: Want, start: int) -> None:
        """Bytes [start, ...) of the part lie as in the view: whole chunks go there, torn ones by scratch."""
        memory, chunk = as_bytes(want.view.detach()).numpy().data, self.source.chunk
        end, whole = start + len(memory), _bytes_of(want)
        first = -(-start // chunk) * chunk
        last = end if end == whole else end // chunk * chunk
        if first >= last:
            self._torn(want, memory, start, end)
            return
        if start < first:
            self._torn(want, memory[: first - start], start, first)
        step = max(self._handle(want.part.file).step // chunk, 1) * chunk
        for at in range(first, last, step):
            piece = memory[at - start : min(at + step, last) - start]
            self._read(want.part.file, [piece], want.part.at + at)
            self._check(want, piece, at)
        if last < end:
            self._torn(want, memory[last - start :], last, end)

    def _torn(self, want: Want, memory: memoryview, start: int, end: int) -> None:
        for at in range(start, end, _SPAN):
            stop = min(at + _SPAN, end)
            memory[at - start : stop - start] = self._aligned(want, at, stop)

    def _by_scratch(self, want: Want, start: int, span: int) -> None:
        data = self._aligned(want, start, start + span)
        flat = torch.frombuffer(data, dtype=DTYPES[want.dtype])
        want.view.copy_(flat.as_strided(tuple(want.view.shape), contiguous_stride(want.part.size)))

    def _aligned(self, want: Want, start: int, end: int) -> memoryview:
        """Bytes [start, end) of a part, checked with the rest of their chunks; valid until the next call."""
        low, high = self._whole_chunks(want, start, end)
        if len(self._scratch) < high - low:
            self._scratch = memoryview(bytearray(max(high - low, min(_SPAN, _bytes_of(want)))))
        data = self._scratch[: high - low]
        self._read(want.part.file, [data], want.part.at + low)
        self._check(want, data, low)
        return data[start - low : end - low]

    def _whole_chunks(self, want: Want, start: int, end: int) -> tuple[int, int]:
        chunk = self.source.chunk
        return start // chunk * chunk, min(-(-end // chunk) * chunk, _bytes_of(want))

    def _check(self, want: Want, data: memoryview, at: int) -> None:
        chunk = self.source.chunk
        if chunk == 1:
            return
        wrong = first_wrong(data, want.part.sums, at // chunk, chunk)
        if wrong >= 0:
            place = want.part.at + wrong * chunk
            end = place + min(chunk, _bytes_of(want) - wrong * chunk)
            reason = (
                f"{want.key} (bytes {place} to {end}) is not what was saved (wrong checksum); "
                "check the disk, and name an older checkpoint"
            )
            raise CheckpointError(self._damaged(want.part.file, reason))

    def _read(self, number: int, pieces: list[memoryview], at: int) -> None:
        try:
            self._handle(number).read_into(pieces, at)
        except EOFError:
            raise CheckpointError(self._damaged(number, _SHORTER)) from None
        except OSError as error:
            raise CheckpointError(self._damaged(number, f"it cannot be read: {reason_of(error)}")) from None
        self.bytes_read += sum(map(len, pieces))

    def _handle(self, number: int) -> OpenFile:
        if number not in self._handles:
            self._handles[number] = open_file(self.source, number)
        return self._handles[number]

    def _damaged(self, number: int, reason: str) -> str:
        return f"{self.path} is damaged: in its file {self.source.files[number].name} {reason}"


def is_small(want: Want) -> bool:
    """Whether a want is one of those that are read with their neighbours."""
    view = want.view
    return view.nbytes <= _SMALL and tuple(view.shape) == want.part.size and _direct(want)


def _place(want: Want) -> tuple[int, int]:
    return want.part.file, want.part.at


def _direct(want: Want) -> bool:
    """Whether the bytes of the file are the view's own, in one piece."""
    view = want.view
    if view.is_conj() or view.is_neg():  # the memory holds the conjugate, or the negative
        return False
    return view.is_contiguous() and view.is_cpu and view.dtype == DTYPES[want.dtype]


def _extent(whole: tuple[int, ...], low: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, int, int]:
    """First element, elements from the first to the last, and elements that lie in one run."""
    strides = contiguous_stride(whole)
    start = sum(a * s for a, s in zip(low, strides, strict=True))
    span = sum((n - 1) * s for n, s in zip(size, strides, strict=True)) + 1
    run = 1
    for n, m in zip(reversed(size), reversed(whole), strict=True):
        run *= n
        if n != m:
            break
    return start, span, run


def _bytes_of(want: Want) -> int:
    return int(prod(want.part.size) * ITEMSIZES[want.dtype])
