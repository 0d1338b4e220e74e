"""Overlaps as strided views of local memory: what is copied, without index lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from shardwright.index.grid import Grid, Overlap


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
    return [view for overlap in found for view in _views(overlap, overlap.source, of_source=True)]


def target_views(found: Iterable[Overlap], shift: int = 0) -> list[Strided]:
    """The shared elements in the target's memory, in the order of `source_views`, moved by `shift`."""
    return [
        view._replace(start=view.start + shift)
        for overlap in found
        for view in _views(overlap, overlap.target, of_source=False)
    ]


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
