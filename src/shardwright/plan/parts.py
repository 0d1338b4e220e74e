"""New lines from old: coordinates of two lines mixed, and what one rank holds cut in equal parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwright.plan.lines import Group, Ints, Line, joined_pieces
from shardwright.plan.shared import Meeting
from shardwright.remember import remembered


def mixed(meeting: Meeting, from_source: frozenset[int], from_target: frozenset[int]) -> Line:
    """A line with the source's coordinates on some axes and the target's on others."""
    source, target = meeting.source, meeting.target
    mine = [axis for axis in source.axes if axis in from_source]
    theirs = [axis for axis in target.axes if axis in from_target]
    if not mine and len(theirs) == len(target.axes):
        return target
    at = {axis: target.at[axis][meeting.of_target] for axis in theirs}
    at |= {axis: source.at[axis][meeting.of_source] for axis in mine}
    return _ordered(target.group, meeting.low, meeting.size, at)


def cut_evenly(line: Line, axis: int, parts: int) -> Line:
    """What each rank holds cut in equal parts, one per coordinate of an axis."""
    slices = [_part(line, part, parts) for part in range(parts)]
    kept, low, size = (np.concatenate(column) for column in zip(*slices, strict=True))
    at = {known: values[kept] for known, values in line.at.items()}
    at[axis] = np.repeat(np.arange(parts), [len(each[0]) for each in slices])
    return _ordered(line.group, low, size, at)


@remembered(256)
def shared(meeting: Meeting) -> Line:
    """What each pair of a rank of the source and a rank of the target share, as a line of pairs.

    An axis that cuts in both has two coordinates here; the source's gets a number that no axis has.
    """
    source, target = meeting.source, meeting.target
    at = {axis: values[meeting.of_target] for axis, values in target.at.items()}
    at |= {-1 - axis: values[meeting.of_source] for axis, values in source.at.items()}
    return _ordered(target.group, meeting.low, meeting.size, at)


def part_of_shared(pairs: Line, parts: int, part: int) -> Line:
    """The target's line with one of so many equal parts of what each pair of ranks shares."""
    kept, low, size = _part(pairs, part, parts)
    at = {axis: values[kept] for axis, values in pairs.at.items() if axis >= 0}
    return _ordered(pairs.group, low, size, at)


def _part(line: Line, part: int, parts: int) -> tuple[Ints, Ints, Ints]:
    """One of so many equal parts of what each rank holds: the pieces it comes from, and where it lies.

    The last part is the largest for every rank.
    """
    if line.position is None:
        return _part_of_boxes(line, part, parts)
    size = line.size[:, 0]
    length = _lengths(line.position, size)
    low, high = length * part // parts, length * (part + 1) // parts
    first = np.maximum(line.position, low)
    last = np.minimum(line.position + size, high)
    kept = np.flatnonzero(last > first)
    offset = line.low[kept, 0] + (first - line.position)[kept]
    return kept, offset[:, None], (last - first)[kept, None]


def _lengths(position: Ints, size: Ints) -> Ints:
    """For each piece the length of its rank's local dim; a rank's first piece is at position 0."""
    first = np.flatnonzero(position == 0)
    if not len(first):
        return np.zeros(0, dtype=np.int64)
    return np.repeat(np.add.reduceat(size, first), np.diff(np.append(first, len(position))))


def _part_of_boxes(line: Line, part: int, parts: int) -> tuple[Ints, Ints, Ints]:
    """The same part of every box, along its longest side."""
    rows = np.arange(len(line.low))
    side = line.size.argmax(axis=1)
    length = line.size[rows, side]
    low, high = length * part // parts, length * (part + 1) // parts
    kept = np.flatnonzero(high > low)
    offset, size = line.low[kept].copy(), line.size[kept].copy()
    offset[np.arange(len(kept)), side[kept]] += low[kept]
    size[np.arange(len(kept)), side[kept]] = (high - low)[kept]
    return kept, offset, size


def _ordered(group: Group, low: Ints, size: Ints, at: Mapping[int, Ints]) -> Line:
    """Pieces as a line: those of one rank together, by their indices."""
    keys = [low[:, dim] for dim in reversed(range(low.shape[1]))]
    order = np.lexsort((*keys, *(at[axis] for axis in sorted(at, reverse=True))))
    low, size = low[order], size[order]
    sorted_at = {axis: values[order] for axis, values in at.items()}
    if len(group) != 1:
        return Line(group, low, size, sorted_at, None)
    first = np.ones(len(low), dtype=bool)
    if len(low):
        first[1:] = False
        for values in sorted_at.values():
            first[1:] |= values[1:] != values[:-1]
    before = np.cumsum(size[:, 0]) - size[:, 0]
    position = before - np.maximum.accumulate(np.where(first, before, 0))
    return joined_pieces(Line(group, low, size, sorted_at, position))
