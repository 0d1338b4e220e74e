"""Where the elements of a local tensor are: in the logical tensor and in memory.

A `Grid` is a product of index intervals, one list per dim, laid over strided memory. A region that is a
product of runs is one grid; any other region is one grid per box.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardwright.index.region import Box, Region
from shardwright.index.runs import Runs, intervals
from shardwright.index.stride import contiguous_stride


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


def cell_of(region: Region, stride: tuple[int, ...]) -> Cell:
    """The grids of a region whose local tensor has this stride (only used where the region is a product)."""
    if region.numel == 0:
        return ()
    if region.runs is not None:
        return (Grid(tuple(positioned(runs) for runs in region.runs), 0, stride),)
    return flat_cell(region.boxes)


def flat_cell(boxes: tuple[Box, ...]) -> Cell:
    """The grids of boxes that lie one after the other in memory, each row-major."""
    grids: list[Grid] = []
    start = 0
    for box in boxes:
        dims = tuple((Interval(o, s, 0),) for o, s in zip(box.offset, box.size, strict=True))
        grids.append(Grid(dims, start, contiguous_stride(box.size)))
        start += box.numel
    return tuple(grids)


def positioned(runs: Runs) -> tuple[Interval, ...]:
    """The intervals of runs, one after the other in the local tensor."""
    pieces: list[Interval] = []
    position = 0
    for offset, size in intervals(runs):
        pieces.append(Interval(offset, size, position))
        position += size
    return tuple(pieces)


def numel(cell: Cell) -> int:
    """Number of elements of a cell."""
    return sum(grid.numel for grid in cell)
