"""Partitions seen along one dim: the indices that a coord holds of it, whatever the class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.index.region import Region
from shardwright.index.runs import Run, Runs, intervals, merged
from shardwright.placement.along_dim import states_runs
from shardwright.placement.base import Partition
from shardwright.remember import remembered

# Runs that are not equal as they stand are compared interval by interval, as long as there are so few.
_FEW = 4096


@remembered(16384)
def held(part: Partition, length: int, n: int, coord: int) -> Runs:
    """The indices that a coord holds of a 1-d tensor, in local order."""
    if states_runs(part):
        part._dim(1)
        return merged(part.runs(length, n, coord))
    return held_along(part.region((length,), n, coord), 0)


def held_along(region: Region, dim: int) -> Runs:
    """The indices of a dim that a region holds, in local order, where it holds all of every other dim."""
    if region.runs is not None:
        return merged(region.runs[dim])
    first = (box for box in region.boxes if not any(box.offset[:dim]) and not any(box.offset[dim + 1 :]))
    return merged(tuple(Run(box.offset[dim], box.size[dim], box.size[dim], 1) for box in first))


def same_runs(first: Runs, second: Runs) -> bool:
    """Whether two lists of runs name the same indices in the same order."""
    if first == second:
        return True
    if sum(run.repeat for run in (*first, *second)) > _FEW:
        return False
    return list(intervals(first)) == list(intervals(second))


def sliced_runs(runs: Runs, start: int, step: int, count: int) -> Runs:
    """Of the indices `start + j * step` (`count` of them) those that the runs name, as values of j."""
    out: list[Run] = []
    for run in runs:
        _slice_run(run, start, step, count, out)
    return merged(tuple(out))


def _slice_run(run: Run, start: int, step: int, count: int, out: list[Run]) -> None:
    if run.repeat == 1:
        first, picked = _picked(run.offset, run.size, start, step, count)
        if picked:
            out.append(Run(first, picked, picked, 1))
        return
    stop = start + (count - 1) * step + 1
    if run.stride < run.size or run.stride % step:
        for offset, size in intervals((run,)):
            _slice_run(Run(offset, size, size, 1), start, step, count, out)
        return
    low = max(-(-(start - run.offset) // run.stride), 0)  # blocks that lie inside the slice from here
    high = min((stop - run.size - run.offset) // run.stride + 1, run.repeat)  # to here
    if low >= high:
        low = high = min(max(low, 0), run.repeat)
    _edge(run, max((start - run.offset) // run.stride, 0), low, (start, step, count), out)
    if high > low:
        first, picked = _picked(run.offset + low * run.stride, run.size, start, step, count)
        if picked:
            out.append(Run(first, picked, run.stride // step, high - low))
    _edge(run, high, min((stop - 1 - run.offset) // run.stride + 1, run.repeat), (start, step, count), out)


def _edge(run: Run, low: int, high: int, picks: tuple[int, int, int], out: list[Run]) -> None:
    """Blocks that the slice cuts; there are two at most."""
    for block in range(low, high):
        first, picked = _picked(run.offset + block * run.stride, run.size, *picks)
        if picked:
            out.append(Run(first, picked, picked, 1))


def _picked(offset: int, size: int, start: int, step: int, count: int) -> tuple[int, int]:
    """The first j and how many of them have `start + j * step` in `[offset, offset + size)`."""
    first = max(-(-(offset - start) // step), 0)
    last = min(-(-(offset + size - start) // step), count)
    return first, max(last - first, 0)


def picked_positions(runs: Runs, start: int, step: int, count: int) -> list[range]:
    """Where in the local dim the picked indices are: one arithmetic progression per interval."""
    found, position = [], 0
    for offset, size in intervals(runs):
        first, picked = _picked(offset, size, start, step, count)
        if picked:
            low = position + start + first * step - offset
            found.append(range(low, low + picked * step, step))
        position += size
    return found


def spread_runs(runs: Runs, outer: int, size: int, inner: int) -> Runs | None:
    """Runs of a dim of this size, each index `inner` wide, `outer` times; None: too many to write down."""
    wide = tuple(Run(r.offset * inner, r.size * inner, r.stride * inner, r.repeat) for r in runs)
    step = size * inner
    if outer == 1 or not wide:
        return merged(wide)
    if len(wide) == 1:
        only = wide[0]
        if only.repeat == 1:
            return merged((Run(only.offset, only.size, step, outer),))
        if only.stride * only.repeat == step:
            return merged((only._replace(repeat=only.repeat * outer),))
    if outer * len(wide) > _FEW:
        return None
    return merged(tuple(r._replace(offset=r.offset + i * step) for i in range(outer) for r in wide))


def runs_of_indices(indices: Iterable[int]) -> Runs:
    """Indices in this order as runs: intervals first, then equal intervals at equal distances."""
    out: list[Run] = []
    for start, size in _intervals_of(indices):
        last = out[-1] if out else None
        if last is None or last.size != size:
            out.append(Run(start, size, size, 1))
        elif last.repeat == 1 and start > last.offset:
            out[-1] = Run(last.offset, size, start - last.offset, 2)
        elif last.repeat > 1 and start == last.offset + last.repeat * last.stride:
            out[-1] = last._replace(repeat=last.repeat + 1)
        else:
            out.append(Run(start, size, size, 1))
    return merged(tuple(out))


def _intervals_of(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    start = end = -1
    for index in indices:
        if index == end:
            end += 1
            continue
        if end > start:
            yield start, end - start
        start, end = index, index + 1
    if end > start:
        yield start, end - start
