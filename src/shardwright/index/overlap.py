"""What two local tensors share, and as strided views of their memory: what is copied, without index lists.

Sharing is computed dim by dim, so its cost is the number of intervals, never the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from shardwright.index.grid import Cell, Grid, Interval
from shardwright.index.region import Box


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


# -------------------------------------------------------------------------------- in memory


class Strided(NamedTuple):
    """The view `local.as_strided(size, stride, start)`; read or written row-major."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    @property
    def is_run(self) -> bool:
        """True when the view is one stretch of consecutive memory."""
        return not self.size or (len(self.size) == 1 and self.stride[0] == 1)


def source_views(found: Iterable[Overlap]) -> list[Strided]:
    """The shared elements in the source's memory."""
    views: list[Strided] = []
    for overlap in found:
        views += _views(overlap, overlap.source, of_source=True)
    return views


def target_views(found: Iterable[Overlap]) -> list[Strided]:
    """The shared elements in the target's memory, in the order of `source_views`."""
    views: list[Strided] = []
    for overlap in found:
        views += _views(overlap, overlap.target, of_source=False)
    return views


def paired_views(found: Iterable[Overlap]) -> list[tuple[Strided, Strided]]:
    """The shared elements in both memories, as pairs of views of one shape."""
    pairs: list[tuple[Strided, Strided]] = []
    for overlap in found:
        sources = _views(overlap, overlap.source, of_source=True, join=False)
        targets = _views(overlap, overlap.target, of_source=False, join=False)
        pairs += zip(sources, targets, strict=True)
    return pairs


def covers_in_order(views: Iterable[Strided], numel: int) -> bool:
    """True when the views, read one after the other, are memory `[0, numel)` itself."""
    position = 0
    for view in views:
        if not view.is_run or view.start != position:
            return False
        position += view.numel
    return position == numel


def as_run(views: Sequence[Strided]) -> Strided | None:
    """The one stretch of consecutive memory that the views are, one after the other, if they are."""
    if not views or not all(view.is_run for view in views):
        return None
    start = end = views[0].start
    for view in views:
        if view.start != end:
            return None
        end += view.numel
    return Strided((end - start,), (1,), start)


def _views(overlap: Overlap, grid: Grid, *, of_source: bool, join: bool = True) -> list[Strided]:
    # A stretch of several intervals is two dims of the view. Both sides walk the same product in the same
    # nesting, so the two lists name the elements in the same order.
    views: list[Strided] = []
    for stretches in product(*overlap.dims):
        size: list[int] = []
        stride: list[int] = []
        start = grid.start
        for stretch, step in zip(stretches, grid.stride, strict=True):
            start += (stretch.source if of_source else stretch.target) * step
            size += [stretch.repeat, stretch.size]
            stride += [(stretch.source_step if of_source else stretch.target_step) * step, step]
        views.append(_simplest(size, stride, start, join=join))
    return views


def _simplest(size: list[int], stride: list[int], start: int, *, join: bool) -> Strided:
    """The same view without dims of length 1; with `join`, dims that are one stretch of memory become one."""
    sizes: list[int] = []
    strides: list[int] = []
    for length, step in zip(size, stride, strict=True):
        if length == 1:
            continue
        if join and sizes and strides[-1] == length * step:
            sizes[-1] *= length
            strides[-1] = step
        else:
            sizes.append(length)
            strides.append(step)
    return Strided(tuple(sizes), tuple(strides), start)
