"""Counting and cutting what cells share: how much, and a part of it by numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.index.grid import Cell, Grid, Interval
from shardwright.index.overlap import Overlap, Stretch, shared

Counts = NDArray[np.int64]


def shared_counts(sources: Sequence[Cell], targets: Sequence[Cell]) -> Counts:
    """How many elements each source cell shares with each target cell:  [sources, targets].

    Cost: per dim, one comparison for each pair of *different* lists of intervals; the rest is array work.
    """
    counts = np.zeros((len(sources), len(targets)), dtype=np.int64)
    mine, theirs = _grids(sources), _grids(targets)
    if not mine or not theirs:
        return counts
    of_grids = np.ones((len(mine), len(theirs)), dtype=np.int64)
    for dim in range(len(mine[0][1].dims)):
        table, rows, columns = _of_dim([grid for _, grid in mine], [grid for _, grid in theirs], dim)
        of_grids *= table[np.ix_(rows, columns)]
    at = np.ix_([index for index, _ in mine], [index for index, _ in theirs])
    np.add.at(counts, at, of_grids)
    return counts


def _grids(cells: Sequence[Cell]) -> list[tuple[int, Grid]]:
    return [(index, grid) for index, cell in enumerate(cells) for grid in cell]


def _of_dim(mine: list[Grid], theirs: list[Grid], dim: int) -> tuple[Counts, list[int], list[int]]:
    """Shared indices of one dim for all pairs of interval lists, and which list each grid has."""
    rows, row_of = _distinct([grid.dims[dim] for grid in mine])
    columns, column_of = _distinct([grid.dims[dim] for grid in theirs])
    ones, twos = ([(Grid((held,), 0, (1,)),) for held in lists] for lists in (rows, columns))
    table = [[shared(one, two) for two in twos] for one in ones]
    return np.array(table, dtype=np.int64), row_of, column_of


def _distinct(lists: list[tuple[Interval, ...]]) -> tuple[list[tuple[Interval, ...]], list[int]]:
    known: dict[tuple[Interval, ...], int] = {}
    which = [known.setdefault(pieces, len(known)) for pieces in lists]
    return list(known), which


def cut_overlaps(found: Sequence[Overlap], low: int, high: int) -> list[Overlap]:
    """Elements `[low, high)` of overlaps in a row, both rounded down to whole slices of the longest dim.

    Consecutive ranges of numbers give disjoint parts that cover everything.
    """
    parts: list[Overlap] = []
    position = 0
    for overlap in found:
        count = overlap.numel
        part = _slices(overlap, max(low - position, 0), min(high - position, count), count)
        if part is not None:
            parts.append(part)
        position += count
    return parts


def _slices(overlap: Overlap, low: int, high: int, count: int) -> Overlap | None:
    if low >= high:
        return None
    if high - low == count:
        return overlap
    lengths = [sum(stretch.size * stretch.repeat for stretch in of_dim) for of_dim in overlap.dims]
    dim = lengths.index(max(lengths))
    slice_size = prod(lengths) // lengths[dim]
    first, last = low // slice_size, high // slice_size
    if first == last:
        return None
    dims = (*overlap.dims[:dim], _indices(overlap.dims[dim], first, last), *overlap.dims[dim + 1 :])
    return replace(overlap, dims=dims)


def _indices(stretches: tuple[Stretch, ...], low: int, high: int) -> tuple[Stretch, ...]:
    """Indices number `low` to `high` of one dim's stretches."""
    out: list[Stretch] = []
    position = 0
    for stretch in stretches:
        count = stretch.size * stretch.repeat
        first, last = max(low - position, 0), min(high - position, count)
        if first < last:
            out += _of_stretch(stretch, first, last)
        position += count
    return tuple(out)


def _of_stretch(stretch: Stretch, first: int, last: int) -> list[Stretch]:
    """Indices `[first, last)` of a stretch: the rest of an interval, whole intervals, the start of one."""
    (low, head), (high, tail) = divmod(first, stretch.size), divmod(last, stretch.size)
    if low == high:
        return [_interval(stretch, low, head, tail - head)]
    parts: list[Stretch] = []
    if head:
        parts.append(_interval(stretch, low, head, stretch.size - head))
        low += 1
    if high > low:
        at = _interval(stretch, low, 0, stretch.size)
        parts.append(at._replace(repeat=high - low, **_steps(stretch)) if high - low > 1 else at)
    return [*parts, _interval(stretch, high, 0, tail)] if tail else parts


def _steps(stretch: Stretch) -> dict[str, int]:
    return {"source_step": stretch.source_step, "target_step": stretch.target_step}


def _interval(stretch: Stretch, which: int, skip: int, size: int) -> Stretch:
    source = stretch.source + which * stretch.source_step + skip
    return Stretch(source, stretch.target + which * stretch.target_step + skip, size, 1, 0, 0)
