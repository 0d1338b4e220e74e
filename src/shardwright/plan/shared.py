"""What two lines of one group of dims share: the pieces that a rank of one map has of a rank of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from shardwright.plan.lines import Ints, Line, ascending
from shardwright.remember import remembered

_SMALL = 1024  # counts of at most this many coordinates are remembered


@dataclass(frozen=True, eq=False)
class Meeting:
    """The pieces that two lines of one group share: rows of the one and of the other, and the shared box."""

    source: Line
    target: Line
    of_source: Ints
    of_target: Ints
    low: Ints
    size: Ints
    _known: dict[object, Ints] = field(default_factory=dict, repr=False)

    @cached_property
    def volume(self) -> Ints:
        """Elements of each shared piece."""
        return self.size[:, 0] if self.size.shape[1] == 1 else self.size.prod(axis=1)

    def agree_on(self, axis: int) -> bool:
        """True if every element has the same coordinate of an axis in both lines."""
        mine, theirs = self.source.at[axis][self.of_source], self.target.at[axis][self.of_target]
        return bool((mine == theirs).all())

    def count(self, source_axes: frozenset[int], target_axes: frozenset[int], sizes: Sequence[int]) -> Ints:
        """How many elements have these coordinates: one dim per axis, 1 long where the axis does not matter.

        Axes in both are asked to agree.
        """
        key = source_axes, target_axes, tuple(sizes)
        known = self._known.get(key)
        if known is None:
            known = self._count(source_axes, target_axes, sizes)
            if known.size <= _SMALL:
                self._known[key] = known
        return known

    def _count(self, source_axes: frozenset[int], target_axes: frozenset[int], sizes: Sequence[int]) -> Ints:
        index = np.zeros(len(self.of_source), dtype=np.int64)
        shape = [1] * len(sizes)
        keep = None
        for axis, size in enumerate(sizes):
            coord = self._coord(axis, source_axes, target_axes)
            if coord is None:
                continue
            index, shape[axis] = index * size + coord, size
            if {axis} <= source_axes & target_axes & self.source.at.keys() & self.target.at.keys():
                same = coord == self.target.at[axis][self.of_target]
                keep = same if keep is None else keep & same
        volume = self.volume
        if keep is not None:
            index, volume = index[keep], volume[keep]
        counts = np.bincount(index, weights=volume, minlength=prod(shape))
        return counts.astype(np.int64).reshape(shape)

    def _coord(self, axis: int, source_axes: frozenset[int], target_axes: frozenset[int]) -> Ints | None:
        if axis in source_axes and axis in self.source.at:
            return self.source.at[axis][self.of_source]
        if axis in target_axes and axis in self.target.at:
            return self.target.at[axis][self.of_target]
        return None


@remembered(1024)
def meet(source: Line, target: Line) -> Meeting:
    """What two lines of one group share."""
    if len(source.group) != 1:
        return _meet_boxes(source, target)
    if source is target:
        order, low = source.by_low
        return Meeting(source, target, order, order, low[:, None], source.size[order])
    (order_s, low_s), (order_t, low_t) = source.by_low, target.by_low
    end_s, end_t = low_s + source.size[order_s, 0], low_t + target.size[order_t, 0]
    cuts = ascending(low_s, low_t, end_s, end_t)
    if not len(low_s) or not len(low_t):
        cuts = cuts[:0]
    i = np.searchsorted(low_s, cuts[:-1], side="right") - 1
    j = np.searchsorted(low_t, cuts[:-1], side="right") - 1
    inside = (i >= 0) & (j >= 0) & (cuts[:-1] < end_s[i]) & (cuts[:-1] < end_t[j])
    low, size = cuts[:-1][inside, None], np.diff(cuts)[inside, None]
    return Meeting(source, target, order_s[i[inside]], order_t[j[inside]], low, size)


def _meet_boxes(source: Line, target: Line) -> Meeting:
    """All pairs of boxes that intersect, found a few rows of the target at a time."""
    rows = max(1, 1_000_000 // max(len(source.low), 1))
    found: list[tuple[Ints, Ints, Ints, Ints]] = []
    for first in range(0, max(len(target.low), 1), rows):
        low_t, size_t = target.low[first : first + rows, None], target.size[first : first + rows, None]
        low = np.maximum(source.low[None], low_t)
        size = np.minimum((source.low + source.size)[None], low_t + size_t) - low
        j, i = np.nonzero((size > 0).all(axis=2))
        found.append((i, j + first, low[j, i], size[j, i]))
    i, j, low, size = (np.concatenate(column) for column in zip(*found, strict=True))
    return Meeting(source, target, i, j, low, size)
