"""Lines: the coordinates of every index of a dim, for all ranks of a mesh in one table.

A line is a list of pieces `[low, low + size)`; a piece has one coordinate on every axis that cuts the dim,
and a position in the local dim of the ranks that hold it. Its cost is the number of pieces, whatever the
number of ranks: nothing here walks over ranks or elements. Dims that a placement flattens into one share a
line, whose pieces are boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.index.region import Region
from shardwright.index.runs import Run, Runs, intervals
from shardwright.layout.layout import Layout
from shardwright.placement.along_dim import states_runs
from shardwright.placement.base import Partition, Replicate
from shardwright.remember import remembered

Ints = npt.NDArray[np.int64]
Group = tuple[int, ...]
# One axis that cuts a dim: its position in the mesh, its size, and the partition that it applies.
Cut = tuple[tuple[int, ...], tuple[int, ...], Partition]


@dataclass(frozen=True, eq=False)
class Line:
    """The pieces of a group of dims, those of one holder together and in local order.

    low, size: one row per piece, one column per dim. at: per axis that cuts the group, each piece's
    coordinate. position: where a piece starts in the holder's local dim; None for a group of several dims.
    """

    group: Group
    low: Ints
    size: Ints
    at: Mapping[int, Ints]
    position: Ints | None

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes that cut these dims, ascending."""
        return tuple(sorted(self.at))

    @cached_property
    def volume(self) -> Ints:
        """Elements of each piece."""
        return self.size[:, 0] if self.size.shape[1] == 1 else self.size.prod(axis=1)

    @cached_property
    def by_low(self) -> tuple[Ints, Ints]:
        """For one dim: the order of the pieces by index, and their first indices in this order."""
        order = np.argsort(self.low[:, 0], kind="stable")
        return order, self.low[order, 0]

    def held_by(self, coords: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which pieces a coordinate of the mesh holds."""
        mask = np.ones(len(self.low), dtype=bool)
        for axis, at in self.at.items():
            mask &= at == coords[axis]
        return mask


def ascending(*values: Ints) -> Ints:
    """Each value once, ascending. `np.unique` imports `numpy.ma` when first called: 15 ms of a first move."""
    found = np.concatenate(values)
    found.sort()
    first = np.ones(len(found), dtype=bool)
    np.not_equal(found[1:], found[:-1], out=first[1:])
    return found[first]


def groups_of(layouts: Iterable[Layout]) -> tuple[Group, ...]:
    """The dims, grouped where one placement of any of the layouts acts on several at once."""
    parents: dict[int, int] = {}
    ndim = 0
    for layout in layouts:
        ndim = len(layout.shape)
        for _, dims in _cutting(layout):
            for dim in dims[1:]:
                parents[_root(parents, dim)] = _root(parents, dims[0])
    if not ndim:
        return ((),)
    if not parents:
        return tuple(zip(range(ndim)))  # (0,), (1,), ...
    grouped: dict[int, list[int]] = {}
    for dim in range(ndim):
        grouped.setdefault(_root(parents, dim), []).append(dim)
    return tuple(sorted(tuple(dims) for dims in grouped.values()))


@remembered(1024)
def _cutting(layout: Layout) -> tuple[tuple[Cut, Group], ...]:
    """What cuts, in order of application, with the dims that it acts on."""
    found: list[tuple[Cut, Group]] = []
    for step in layout.applied:
        if step.partition is not None:
            dims = tuple(step.partition.touched_dims(layout.shape, step.size))
            found.append(((step.axes, step.sizes, step.partition), dims))
    return tuple(found)


def _root(parents: Mapping[int, int], dim: int) -> int:
    while parents.get(dim, dim) != dim:
        dim = parents[dim]
    return dim


def lines_of(layout: Layout, groups: Sequence[Group]) -> tuple[Line, ...]:
    """The lines of a layout, one per group of dims."""
    cutting, lines = _cutting(layout), []
    for group in groups:
        # A group is closed: a placement that touches one of its dims belongs to it.
        cuts = tuple([cut for cut, dims in cutting if not group or (dims or (0,))[0] in group])
        if len(group) == 1:
            lines.append(_dim_line(layout.shape[group[0]], group[0], len(layout.shape), cuts))
        else:
            lines.append(_group_line(layout, group, tuple([axis for axes, _, _ in cuts for axis in axes])))
    return tuple(lines)


# --------------------------------------------------------------------------------------------- one dim


@remembered(1024)
def _dim_line(length: int, dim: int, ndim: int, cuts: tuple[Cut, ...]) -> Line:
    """The line of one dim after these cuts, the first one first."""
    if not cuts:
        whole = np.array([[length]] if length else np.zeros((0, 1)), dtype=np.int64)
        zeros = np.zeros_like(whole)
        return Line((dim,), zeros, whole, {}, zeros[:, 0])
    return _refined(_dim_line(length, dim, ndim, cuts[:-1]), dim, ndim, cuts[-1])


@remembered(4096)
def _shares(partition: Partition, dim: int, ndim: int, length: int, n: int) -> Ints:
    """Who holds which local indices of a dim: rows (start, size, coord, position), by start."""
    stated = partition if states_runs(partition) else None
    shape = (1,) * dim + (length,) + (1,) * (ndim - dim - 1)
    rows: list[Ints] = []
    for coord in range(n):
        if stated is not None:
            found = _of_runs(stated.runs(length, n, coord))
        else:
            found = _intervals(partition.region(shape, n, coord), dim)
        if len(found):
            position = np.cumsum(found[:, 1]) - found[:, 1]
            rows.append(np.column_stack([found, np.full(len(found), coord), position]))
    if not rows:
        return np.zeros((0, 4), dtype=np.int64)
    table: Ints = np.concatenate(rows).astype(np.int64)
    return table[np.argsort(table[:, 0], kind="stable")]


def _intervals(region: Region, dim: int) -> Ints:
    """Offset and size of the intervals of a dim, in local order."""
    if not region.numel:
        return np.zeros((0, 2), dtype=np.int64)
    if region.runs is None:
        return np.array([(box.offset[dim], box.size[dim]) for box in region.boxes], dtype=np.int64)
    return _of_runs(region.runs[dim])


def _of_runs(runs: Runs) -> Ints:
    if len(runs) == 1:
        return _of_run(runs[0])
    found = [_of_run(run) for run in runs]
    return np.concatenate(found) if found else np.zeros((0, 2), dtype=np.int64)


def _of_run(run: Run) -> Ints:
    if run.repeat == 1:
        return np.array([(run.offset, run.size)], dtype=np.int64)
    offsets = run.offset + run.stride * np.arange(run.repeat, dtype=np.int64)
    return np.column_stack([offsets, np.full(run.repeat, run.size)])


def _refined(line: Line, dim: int, ndim: int, cut: Cut) -> Line:
    """The line after one more cut, for all holders at once.

    All local dims are laid end to end; the pieces, and the shares of each local dim, cut this one long line.
    """
    axes, ns, partition = cut
    n = prod(ns)
    holder = _holders(line)
    lengths = np.bincount(holder, weights=line.volume).astype(np.int64) if len(holder) else np.zeros(0, int)
    base = np.cumsum(lengths) - lengths
    starts = base[holder] + line.position
    shares = _laid_out(partition, dim, ndim, n, lengths, base)
    at_cut = ascending(starts, shares[:, 0])
    sizes = np.diff(np.append(at_cut, lengths.sum()))
    piece = np.searchsorted(starts, at_cut, side="right") - 1
    share = np.searchsorted(shares[:, 0], at_cut, side="right") - 1
    low = line.low[piece, 0] + at_cut - starts[piece]
    position = shares[share, 3] + at_cut - shares[share, 0]
    coord = shares[share, 2]
    order = np.lexsort((position, holder[piece] * n + coord))
    at = {known: values[piece[order]] for known, values in line.at.items()}
    if n > 1:
        at.update(zip(axes, np.unravel_index(coord[order], ns), strict=True))
    return joined_pieces(Line(line.group, low[order, None], sizes[order, None], at, position[order]))


def _holders(line: Line) -> Ints:
    """The number of each piece's holder, counted in the order of the pieces."""
    if not len(line.low):
        return np.zeros(0, dtype=np.int64)
    first = np.zeros(len(line.low), dtype=bool)
    for at in line.at.values():
        first[1:] |= at[1:] != at[:-1]
    return np.cumsum(first)


def _laid_out(partition: Partition, dim: int, ndim: int, n: int, lengths: Ints, base: Ints) -> Ints:
    """The shares of every local dim, where it lies in the long line."""
    rows: list[Ints] = []
    different = sorted(set(lengths.tolist()))
    for length in different:
        shares = _shares(partition, dim, ndim, length, n)
        bases = base[lengths == length] if len(different) > 1 else base
        laid = np.tile(shares, (len(bases), 1))
        laid[:, 0] += np.repeat(bases, len(shares))
        rows.append(laid)
    if len(rows) == 1:
        return rows[0]
    table = np.concatenate(rows) if rows else np.zeros((0, 4), dtype=np.int64)
    return table[np.argsort(table[:, 0], kind="stable")]


def joined_pieces(line: Line) -> Line:
    """Pieces that follow each other in the dim and in the same local dim become one."""
    low, size = line.low[:, 0], line.size[:, 0]
    if len(low) < 2 or line.position is None:
        return line
    first = np.ones(len(low), dtype=bool)
    first[1:] = (low[1:] != low[:-1] + size[:-1]) | (line.position[1:] != line.position[:-1] + size[:-1])
    for at in line.at.values():
        first[1:] |= at[1:] != at[:-1]
    if first.all():
        return line
    starts = np.flatnonzero(first)
    merged = {axis: values[starts] for axis, values in line.at.items()}
    sizes = np.add.reduceat(line.size, starts)
    return Line(line.group, line.low[starts], sizes, merged, line.position[starts])


# ---------------------------------------------------------------------------------- several dims in one


@remembered(1024)
def _group_line(layout: Layout, group: Group, axes: tuple[int, ...]) -> Line:
    """The boxes of dims that some placement flattens, coordinate by coordinate of the axes that cut them."""
    alone = [p if axis in axes else Replicate() for axis, p in enumerate(layout.placements)]
    shape = tuple(size if dim in group else 1 for dim, size in enumerate(layout.shape))
    part = Layout(layout.mesh_shape, alone, shape, dtype=layout.dtype, order=layout.order_names)
    wide = tuple(axis for axis in axes if layout.sizes[axis] > 1)
    rows: list[Any] = []
    for coords in product(*(range(size if axis in wide else 1) for axis, size in enumerate(layout.sizes))):
        rows += [(*box, [coords[axis] for axis in wide]) for box in _boxes(part.region(coords), group)]
    width = max(len(group), 1)
    low, size = (np.array([row[i] for row in rows], dtype=np.int64).reshape(len(rows), width) for i in (0, 1))
    coord = np.array([row[2] for row in rows], dtype=np.int64).reshape(len(rows), len(wide))
    return Line(group, low, size, {axis: coord[:, i] for i, axis in enumerate(wide)}, None)


def _boxes(region: Region, group: Group) -> list[tuple[list[int], list[int]]]:
    """Offset and size of a region on the dims of a group; their order is not that of memory."""
    if not region.numel:
        return []
    if not group:
        return [([0], [1])]
    if region.runs is not None:
        cells = product(*(list(intervals(region.runs[dim])) for dim in group))
        return [([low for low, _ in cell], [size for _, size in cell]) for cell in cells]
    return [([box.offset[dim] for dim in group], [box.size[dim] for dim in group]) for box in region.boxes]
