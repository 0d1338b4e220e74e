"""Maps: for every coordinate of the mesh, what it holds and where in its memory.

A layout is a map (`LayoutMap`). A redistribution may go through maps that are no layouts: an element's
coordinate on one axis taken from the target, on another from the source, on a third from an even cut
(`MixedMap`); or a part of the elements only (`SlabMap`). A map knows nothing of Pending: axes that do not
cut leave an element's coordinate free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import cast

from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition
from shardwright.placement.region import Box
from shardwright.plan.grid import Cell, cell_of, flat_cell, numel, row_major, shared_boxes

Coords = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LayoutMap:
    """The map of a layout, its Pending axes counted as Replicate."""

    layout: Layout
    _cells: dict[Coords, Cell] = field(default_factory=dict, repr=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the mesh axes."""
        return self.layout.sizes

    @cached_property
    def cut(self) -> frozenset[int]:
        """The axes with a Partition and more than one coordinate."""
        layout = self.layout
        return frozenset(
            axis
            for axis, placement in enumerate(layout.placements)
            if placement.is_partition and layout.sizes[axis] > 1
        )

    @property
    def elements(self) -> int:
        """How many elements the map places."""
        return self.layout.numel

    @property
    def is_even(self) -> bool:
        """True only if all ranks hold equally many elements: every placement is even on what it is given."""
        layout = self.layout
        shapes = layout.shapes_along_order((0,) * len(layout.sizes))
        return all(
            cast("Partition", layout.placements[axis]).even(shape, layout.sizes[axis])
            for axis, shape in zip(layout.order, shapes, strict=False)
            if axis in self.cut
        )

    def cell(self, coords: Coords) -> Cell:
        """The layout's region at these coordinates."""
        key = _only(coords, self.cut)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = cell_of(self.layout.region(key), self.local_stride(key))
        return cell

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """The layout's local shape."""
        return self.layout.local_shape(coords)

    def local_stride(self, coords: Coords) -> tuple[int, ...]:
        """The layout's local stride; row-major where the region is a list of boxes, whose order is."""
        if self.layout.region(coords).runs is None:
            return row_major(self.layout.local_shape(coords))
        return self.layout.local_stride(coords)


@dataclass(frozen=True, eq=False)
class MixedMap:
    """A map made of two layouts' maps; a local tensor is flat, its boxes one after the other.

    An element's coordinate is the source's on the axes `from_source`, the target's on every axis that the
    target cuts; the cells that result are cut evenly over the axes `free`.
    """

    source: LayoutMap
    target: Map
    from_source: frozenset[int]
    free: tuple[int, ...]
    _cells: dict[Coords, Cell] = field(default_factory=dict, repr=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the mesh axes."""
        return self.target.sizes

    @cached_property
    def cut(self) -> frozenset[int]:
        """Axes of both kinds and the free ones."""
        return self.from_source | self.target.cut | frozenset(self.free)

    @property
    def elements(self) -> int:
        """How many elements the map places."""
        return self.target.elements

    def cell(self, coords: Coords) -> Cell:
        """The boxes of these coordinates, one after the other in memory."""
        key = _only(coords, self.cut)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = flat_cell(tuple(self._share(key)))
        return cell

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """One dim: the number of elements held."""
        return (numel(self.cell(coords)),)

    def local_stride(self, coords: Coords) -> tuple[int, ...]:  # noqa: ARG002 - always flat
        """One."""
        return (1,)

    def _share(self, coords: Coords) -> list[Box]:
        """This coordinate's part of every box that it shares with those that differ on the free axes."""
        boxes = [
            box for cell in self._source_cells(coords) for box in shared_boxes(cell, self.target.cell(coords))
        ]
        parts = prod(self.sizes[axis] for axis in self.free)
        part = 0
        for axis in self.free:
            part = part * self.sizes[axis] + coords[axis]
        return [share for box in boxes if (share := _part_of(box, part, parts)).numel]

    def _source_cells(self, coords: Coords) -> list[Cell]:
        """The source's cells on every coordinate of the axes that only the source cuts."""
        spread = sorted(self.source.cut - self.from_source)
        cells: list[Cell] = []
        for values in product(*(range(self.sizes[axis]) for axis in spread)):
            at = list(coords)
            for axis, value in zip(spread, values, strict=True):
                at[axis] = value
            cells.append(self.source.cell(tuple(at)))
        return cells


@dataclass(frozen=True, eq=False)
class SlabMap:
    """The elements of a map inside a box; a local tensor is flat, its boxes one after the other."""

    base: LayoutMap | MixedMap
    slab: Box
    _cells: dict[Coords, Cell] = field(default_factory=dict, repr=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the mesh axes."""
        return self.base.sizes

    @property
    def cut(self) -> frozenset[int]:
        """Those of the whole map."""
        return self.base.cut

    @property
    def elements(self) -> int:
        """How many elements the map places."""
        return self.slab.numel

    def cell(self, coords: Coords) -> Cell:
        """The boxes of these coordinates inside the slab, one after the other in memory."""
        key = _only(coords, self.cut)
        cell = self._cells.get(key)
        if cell is None:
            inside = shared_boxes(self.base.cell(key), flat_cell((self.slab,)))
            cell = self._cells[key] = flat_cell(tuple(inside))
        return cell

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """One dim: the number of elements held."""
        return (numel(self.cell(coords)),)

    def local_stride(self, coords: Coords) -> tuple[int, ...]:  # noqa: ARG002 - always flat
        """One."""
        return (1,)


Map = LayoutMap | MixedMap | SlabMap


def _only(coords: Coords, axes: frozenset[int]) -> Coords:
    """Zero on the axes that make no difference, so that equal cells are made once."""
    return tuple(coord if axis in axes else 0 for axis, coord in enumerate(coords))


def _part_of(box: Box, part: int, parts: int) -> Box:
    """One of `parts` even slices of a box along its longest dim (a 0-d box goes to the first)."""
    if parts == 1:
        return box
    if not box.size:
        return box if part == 0 else Box((0,), (0,))
    dim = box.size.index(max(box.size))
    low, high = box.size[dim] * part // parts, box.size[dim] * (part + 1) // parts
    offset = (*box.offset[:dim], box.offset[dim] + low, *box.offset[dim + 1 :])
    return Box(offset, (*box.size[:dim], high - low, *box.size[dim + 1 :]))


def unchanged_axes(source: Map, target: Map) -> frozenset[int]:
    """Axes on which every element provably keeps its coordinate; others may keep it too."""
    if isinstance(target, SlabMap):
        return target.cut if target is _goal(source) else unchanged_axes(source, target.base)
    if isinstance(target, MixedMap) and target.source is source:
        return target.from_source | unchanged_axes(source, target.target)
    if isinstance(source, LayoutMap) and isinstance(target, LayoutMap):
        return _same_cuts(source, target)
    return target.cut if target is _goal(source) else frozenset()


def _goal(source: Map) -> Map | None:
    """The map whose coordinates a mixed map has already."""
    return source.target if isinstance(source, MixedMap) else None


def _same_cuts(source: LayoutMap, target: LayoutMap) -> frozenset[int]:
    """Axes with one placement in both, and before it the same placements on the dims that it touches."""
    return frozenset(
        axis for axis in source.cut & target.cut if _history(source, axis) == _history(target, axis)
    )


def _history(which: LayoutMap, axis: int) -> list[tuple[int, object]]:
    """The placements that decide an axis' coordinate of an element, its own first."""
    layout = which.layout
    earlier = layout.order[: layout.order.index(axis)]
    dims = _touched(layout, axis)
    history: list[tuple[int, object]] = [(axis, layout.placements[axis])]
    for other in reversed(earlier):
        touched = _touched(layout, other) if other in which.cut else frozenset()
        if touched & dims:
            history.append((other, layout.placements[other]))
            dims |= touched
    return history


def _touched(layout: Layout, axis: int) -> frozenset[int]:
    placement = cast("Partition", layout.placements[axis])
    return frozenset(placement.touched_dims(layout.shape, layout.sizes[axis]))


def every_coords(sizes: tuple[int, ...]) -> list[Coords]:
    """All coordinates of a mesh, in the order of its ranks."""
    return list(product(*(range(size) for size in sizes)))
