"""Maps: for every coordinate of the mesh, what it holds and where in its memory.

A layout is a map (`LayoutMap`). A redistribution may go through maps that are no layouts: an element's
coordinate on one axis taken from the target, on another from the source, on a third from an even cut
(`MixedMap`); or a part of the elements only (`SlabMap`). A map knows nothing of Pending: axes that do not
cut leave an element's coordinate free.

Every map has one line per group of dims (`plan.lines`); an element's coordinates are those of its lines.
The two sides of a redistribution have the same groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import cast

import numpy as np

from shardwright.index.grid import Cell, Grid, Interval, cell_of, flat_cell, numel
from shardwright.index.region import Box
from shardwright.index.stride import contiguous_stride
from shardwright.layout.layout import Layout
from shardwright.plan.lines import Group, Ints, Line, groups_of, lines_of
from shardwright.plan.parts import cut_evenly, mixed, part_of_shared, shared
from shardwright.plan.shared import meet
from shardwright.plan.work import Memory, Seat

Coords = tuple[int, ...]


class _Lines(ABC):
    """What follows from the lines of a map."""

    sizes: tuple[int, ...]
    lines: tuple[Line, ...]

    def coords(self, seat: Seat) -> Coords:
        """Where a rank is on the mesh: its seat itself."""
        return cast("Coords", seat)

    def memory(self, seat: Seat) -> Memory:
        """The memory of the local tensor at these coordinates."""
        coords = self.coords(seat)
        return Memory(self.local_shape(coords), self.local_stride(coords))

    @abstractmethod
    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """Shape of the local tensor."""

    @abstractmethod
    def local_stride(self, coords: Coords) -> tuple[int, ...]:
        """Stride of the local tensor."""

    @cached_property
    def is_product(self) -> bool:
        """True if every line is one dim: what a rank holds is then a product of index lists."""
        return max([len(line.group) for line in self.lines], default=1) == 1

    @cached_property
    def counts(self) -> Ints:
        """How many elements each coordinate holds: one dim per axis, 1 long where it makes no difference."""
        counts = np.ones((1,) * len(self.sizes), dtype=np.int64)
        for line in self.lines:
            counts = counts * meet(line, line).count(frozenset(line.at), frozenset(), self.sizes)
        return counts


@dataclass(frozen=True, eq=False)
class LayoutMap(_Lines):
    """The map of a layout, its Pending axes counted as Replicate. groups: of its lines, at least its own."""

    layout: Layout
    groups: tuple[Group, ...] = ()
    _cells: dict[Coords, Cell] = field(default_factory=dict, repr=False)

    @cached_property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Lengths of the mesh axes."""
        return self.layout.sizes

    @cached_property
    def lines(self) -> tuple[Line, ...]:  # type: ignore[override]
        """One line per group of dims."""
        return lines_of(self.layout, self.groups or groups_of((self.layout,)))

    @cached_property
    def cut(self) -> frozenset[int]:
        """The axes with a Partition and more than one coordinate."""
        placements, sizes = self.layout.placements, self.layout.sizes
        return frozenset([a for a, n in enumerate(sizes) if n > 1 and placements[a].is_partition])

    @cached_property
    def elements(self) -> int:
        """How many elements the map places."""
        return self.layout.numel

    @property
    def is_even(self) -> bool:
        """True only if all ranks hold equally many elements: every placement is even on what it is given."""
        return self.layout.is_even

    def cell(self, seat: Seat) -> Cell:
        """The layout's region at these coordinates."""
        key = _only(self.coords(seat), self.cut)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = cell_of(self.layout.region(key), self.local_stride(key))
        return cell

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """The layout's local shape."""
        return self.layout.local_shape(coords)

    def local_stride(self, coords: Coords) -> tuple[int, ...]:
        """The layout's local stride; row-major where the region is a list of boxes, whose order is."""
        if not self.layout.by_runs and self.layout.region(coords).runs is None:
            return contiguous_stride(self.layout.local_shape(coords))
        return self.layout.local_stride(coords)


class _OwnMemory(_Lines):
    """A map whose local tensors are its own: a row-major product, or flat boxes one after the other."""

    cut: frozenset[int]  # the axes that make a difference
    _cells: dict[Coords, Cell]

    def cell(self, seat: Seat) -> Cell:
        """What these coordinates hold."""
        key = _only(self.coords(seat), self.cut)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = self._product(key) if self.is_product else flat_cell(self._boxes(key))
        return cell

    def _product(self, coords: Coords) -> Cell:
        dims = tuple(_intervals(line, coords) for line in self.lines)
        shape = tuple(sum(piece.size for piece in of_dim) for of_dim in dims)
        return (Grid(dims, 0, contiguous_stride(shape)),) if prod(shape) else ()

    def _boxes(self, coords: Coords) -> tuple[Box, ...]:
        held = [line.held_by(coords) for line in self.lines]
        sides = [
            list(zip(line.low[mask].tolist(), line.size[mask].tolist(), strict=True))
            for line, mask in zip(self.lines, held, strict=True)
        ]
        dims = [dim for line in self.lines for dim in line.group]
        return tuple(_box(cell, dims) for cell in product(*sides))

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """One length per dim; the number of elements where boxes lie one after the other."""
        if not self.is_product:
            return (numel(self.cell(coords)),)
        return tuple(int(line.volume[line.held_by(coords)].sum()) for line in self.lines)

    def local_stride(self, coords: Coords) -> tuple[int, ...]:
        """Row-major."""
        return contiguous_stride(self.local_shape(coords))


@dataclass(frozen=True, eq=False)
class MixedMap(_OwnMemory):
    """A map made of two maps.

    An element's coordinate is the source's on the axes `from_source`, the target's on the axes `from_target`
    (None: on every axis that the target cuts); what results is cut evenly over the axes `free`.
    """

    source: Map
    target: Map
    from_source: frozenset[int]
    free: tuple[int, ...]
    from_target: frozenset[int] | None = None
    _cells: dict[Coords, Cell] = field(default_factory=dict, repr=False)

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Lengths of the mesh axes."""
        return self.target.sizes

    @cached_property
    def _of_target(self) -> frozenset[int]:
        return self.target.cut if self.from_target is None else self.from_target & self.target.cut

    @cached_property
    def cut(self) -> frozenset[int]:  # type: ignore[override]
        """Axes of both kinds and the free ones."""
        return self.from_source | self._of_target | frozenset(self.free)

    @property
    def elements(self) -> int:
        """How many elements the map places."""
        return self.target.elements

    @cached_property
    def lines(self) -> tuple[Line, ...]:  # type: ignore[override]
        """Those of the target with the source's coordinates on some axes, and the even cuts."""
        pairs = zip(self.source.lines, self.target.lines, strict=True)
        lines = [mixed(meet(mine, theirs), self.from_source, self._of_target) for mine, theirs in pairs]
        for axis in self.free:
            if self.sizes[axis] > 1:
                at = _roomiest(lines, self.sizes[axis])
                lines[at] = cut_evenly(lines[at], axis, self.sizes[axis])
        return tuple(lines)


@dataclass(frozen=True, eq=False)
class SlabMap(_OwnMemory):
    """Part `index` of `count` of a map's elements.

    Of everything that one rank of `source` has for one rank of `base`, an equal part.
    """

    source: LayoutMap
    base: LayoutMap | MixedMap
    count: int
    index: int
    _cells: dict[Coords, Cell] = field(default_factory=dict, repr=False)

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        """Lengths of the mesh axes."""
        return self.base.sizes

    @property
    def cut(self) -> frozenset[int]:  # type: ignore[override]
        """Those of the whole map."""
        return self.base.cut

    @cached_property
    def elements(self) -> int:
        """How many elements the map places."""
        return prod(int(line.volume.sum()) for line in self.lines)

    @cached_property
    def lines(self) -> tuple[Line, ...]:  # type: ignore[override]
        """Those of the whole map, one of them cut down."""
        lines = list(self.base.lines)
        pairs = [shared(meet(mine, theirs)) for mine, theirs in zip(self.source.lines, lines, strict=True)]
        at = _roomiest(pairs, self.count)
        lines[at] = part_of_shared(pairs[at], self.count, self.index)
        return tuple(lines)


Map = LayoutMap | MixedMap | SlabMap


def _roomiest(lines: Sequence[Line], parts: int) -> int:
    """The line to cut in so many parts: the first whose pieces of one rank are long enough, or the longest.

    Cutting an outer dim leaves longer stretches of memory than cutting an inner one.
    """
    room = [_least_length(line) for line in lines]
    for at, length in enumerate(room):
        if len(lines[at].group) == 1 and (length >= 16 * parts or (length and length % parts == 0)):
            return at
    return room.index(max(room))


def _least_length(line: Line) -> int:
    """The shortest local dim of a rank that holds anything; of a group of dims, the longest side of a box."""
    if not len(line.low):
        return 0
    if line.position is None:
        return int(line.size.max(axis=1).min())
    ends = line.position + line.size[:, 0]
    last = np.append(line.position[1:] == 0, True)
    return int(ends[last].min())


def _only(coords: Coords, axes: frozenset[int]) -> Coords:
    """Zero on the axes that make no difference, so that equal cells are made once."""
    return tuple(coord if axis in axes else 0 for axis, coord in enumerate(coords))


def _intervals(line: Line, coords: Coords) -> tuple[Interval, ...]:
    mask = line.held_by(coords)
    columns = (line.low[mask, 0], line.size[mask, 0], cast("Ints", line.position)[mask])
    return tuple(Interval(*row) for row in zip(*(column.tolist() for column in columns), strict=True))


def _box(cell: tuple[tuple[list[int], list[int]], ...], dims: list[int]) -> Box:
    lows, sizes = ([value for side in cell for value in side[i]] for i in (0, 1))
    if not dims:
        return Box((), ())
    place = sorted(range(len(dims)), key=dims.__getitem__)
    return Box(tuple(lows[i] for i in place), tuple(sizes[i] for i in place))


def unchanged_axes(source: Map, target: Map) -> frozenset[int]:
    """The axes that cut in both and on which every element keeps its coordinate."""
    return frozenset(
        axis
        for mine, theirs in zip(source.lines, target.lines, strict=True)
        for axis in mine.axes
        if axis in theirs.at and meet(mine, theirs).agree_on(axis)
    )


def every_coords(sizes: tuple[int, ...]) -> list[Coords]:
    """All coordinates of a mesh, in the order of its ranks."""
    return list(product(*(range(size) for size in sizes)))
