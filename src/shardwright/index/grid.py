"""Where the elements of a local tensor are: in the logical tensor and in memory; and what two of them share.

A `Grid` is a product of index intervals, one list per dim, laid over strided memory. A region that is a
product of runs is one grid; any other region is one grid per box. Sharing is computed dim by dim, so its
cost is the number of intervals, never the number of elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardwright.index.region import Box, Region
from shardwright.index.runs import Runs, intervals


class Interval(NamedTuple):
    """Logical indices `[offset, offset + size)` of one dim; they start at local index `position`."""

    offset: int
    size: int
    position: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A product of intervals in memory: local index (i, j) is at `start + i * stride[0] + j * stride[1]`."""

    dims: tuple[tuple[Interval, ...], ...]
    start: int
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(sum(piece.size for piece in pieces) for pieces in self.dims)


Cell = tuple[Grid, ...]


class Stretch(NamedTuple):
    """Indices of one dim that two grids share: `repeat` intervals of `size`, evenly spaced in both."""

    source: int
    target: int
    size: int
    repeat: int
    source_step: int
    target_step: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """The elements that two grids share, a product of stretches per dim, in the target's order."""

    source: Grid
    target: Grid
    dims: tuple[tuple[Stretch, ...], ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(sum(stretch.size * stretch.repeat for stretch in of_dim) for of_dim in self.dims)


def cell_of(region: Region, stride: tuple[int, ...]) -> Cell:
    """The grids of a region whose local tensor has this stride (only used where the region is a product)."""
    if region.numel == 0:
        return ()
    if region.runs is not None:
        return (Grid(tuple(_positioned(runs) for runs in region.runs), 0, stride),)
    return flat_cell(region.boxes)


def flat_cell(boxes: tuple[Box, ...]) -> Cell:
    """The grids of boxes that lie one after the other in memory, each row-major."""
    grids: list[Grid] = []
    start = 0
    for box in boxes:
        dims = tuple((Interval(o, s, 0),) for o, s in zip(box.offset, box.size, strict=True))
        grids.append(Grid(dims, start, row_major(box.size)))
        start += box.numel
    return tuple(grids)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def _positioned(runs: Runs) -> tuple[Interval, ...]:
    pieces: list[Interval] = []
    position = 0
    for offset, size in intervals(runs):
        pieces.append(Interval(offset, size, position))
        position += size
    return tuple(pieces)


def overlaps(source: Cell, target: Cell) -> tuple[Overlap, ...]:
    """What two cells share, target grid by target grid."""
    found = (_overlap(a, b) for b in target for a in source)
    return tuple(overlap for overlap in found if overlap is not None)


def shared(source: Cell, target: Cell) -> int:
    """How many elements two cells share."""
    return sum(
        prod(sum(size for _, _, size in _common(x, y)) for x, y in zip(a.dims, b.dims, strict=True))
        for b in target
        for a in source
    )


def shared_boxes(source: Cell, target: Cell) -> list[Box]:
    """What two cells share as boxes in logical indices, in the target's order of intervals."""
    return [box for b in target for a in source for box in _boxes(a, b)]


def _boxes(a: Grid, b: Grid) -> list[Box]:
    boxes = [Box((), ())]
    for mine, theirs in zip(a.dims, b.dims, strict=True):
        common = [
            (max(x.offset, y.offset), min(x.offset + x.size, y.offset + y.size)) for y in theirs for x in mine
        ]
        boxes = [
            Box((*box.offset, low), (*box.size, high - low))
            for box in boxes
            for low, high in common
            if low < high
        ]
    return boxes


def numel(cell: Cell) -> int:
    """Number of elements of a cell."""
    return sum(grid.numel for grid in cell)


def _overlap(source: Grid, target: Grid) -> Overlap | None:
    dims: list[tuple[Stretch, ...]] = []
    for mine, theirs in zip(source.dims, target.dims, strict=True):
        common = _common(mine, theirs)
        if not common:
            return None
        dims.append(stretches(common))
    return Overlap(source, target, tuple(dims))


def _common(source: tuple[Interval, ...], target: tuple[Interval, ...]) -> list[tuple[int, int, int]]:
    """Shared indices of one dim as (source position, target position, size), in the target's order."""
    if len(source) == 1 and len(target) == 1:
        return _meet(source[0], target[0])
    found: list[tuple[int, int, int]] = []
    by_offset = sorted(source)
    first = 0
    for piece in sorted(target):
        while first < len(by_offset) and by_offset[first].offset + by_offset[first].size <= piece.offset:
            first += 1
        for other in by_offset[first:]:
            if other.offset >= piece.offset + piece.size:
                break
            found += _meet(other, piece)
    found.sort(key=lambda item: item[1])
    return found


def _meet(source: Interval, target: Interval) -> list[tuple[int, int, int]]:
    low = max(source.offset, target.offset)
    high = min(source.offset + source.size, target.offset + target.size)
    if low >= high:
        return []
    return [(source.position + low - source.offset, target.position + low - target.offset, high - low)]


def stretches(common: list[tuple[int, int, int]]) -> tuple[Stretch, ...]:
    """Join pieces of one size whose positions advance regularly on both sides."""
    out: list[Stretch] = []
    for source, target, size in common:
        joined = _extended(out[-1], source, target, size) if out else None
        if joined is None:
            out.append(Stretch(source, target, size, 1, 0, 0))
        else:
            out[-1] = joined
    return tuple(out)


def _extended(last: Stretch, source: int, target: int, size: int) -> Stretch | None:
    if last.size != size:
        return None
    if last.repeat == 1 and (source < last.source or target < last.target):
        return None  # torch has no negative strides
    if last.repeat == 1:
        return Stretch(last.source, last.target, size, 2, source - last.source, target - last.target)
    regular = (
        source == last.source + last.repeat * last.source_step
        and target == last.target + last.repeat * last.target_step
    )
    return last._replace(repeat=last.repeat + 1) if regular else None
