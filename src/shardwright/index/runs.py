"""Which indices of one dim a coord holds, as a short list of periodic runs.

A run is `repeat` intervals of `size` indices, `stride` apart. A list of runs, in list order, is the local
index of that dim: local index i is the i-th index that the list names. Not a set: the order is part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Run(NamedTuple):
    """`repeat` intervals `[offset + i * stride, offset + i * stride + size)`, in this order."""

    offset: int
    size: int
    stride: int
    repeat: int

    @property
    def total(self) -> int:
        """Number of indices."""
        return self.size * self.repeat


Runs = tuple[Run, ...]


def interval(start: int, stop: int) -> Runs:
    """The indices `[start, stop)`; no run when there are none."""
    return (Run(start, stop - start, stop - start, 1),) if stop > start else ()


def total(runs: Runs) -> int:
    """How many indices the runs name."""
    if len(runs) == 1:
        return runs[0].size * runs[0].repeat
    return sum(run.size * run.repeat for run in runs)


def intervals(runs: Runs) -> Iterator[tuple[int, int]]:
    """Every interval as `(offset, size)`, in local order, neighbours that touch joined."""
    start = end = 0
    for run in runs:
        for i in range(run.repeat):
            offset = run.offset + i * run.stride
            if offset == end:
                end += run.size
                continue
            if end > start:
                yield start, end - start
            start, end = offset, offset + run.size
    if end > start:
        yield start, end - start


def merged(runs: Runs) -> Runs:
    """The same indices in the same order, without empty runs and with touching intervals joined."""
    out: list[Run] = []
    for given in runs:
        if given.total == 0:
            continue
        run = given if given.repeat > 1 and given.stride != given.size else _one(given)
        if out and out[-1].repeat == 1 == run.repeat and out[-1].offset + out[-1].size == run.offset:
            last = out.pop()
            run = _one(Run(last.offset, last.size + run.size, 0, 1))
        out.append(run)
    return tuple(out)


def _one(run: Run) -> Run:
    size = run.size * run.repeat
    return Run(run.offset, size, size, 1)


def compose(outer: Runs, inner: Runs) -> Runs:
    """The indices that local indices `inner` of a holder of `outer` stand for, in the order of `inner`.

    Closed form where the periods fit; otherwise one step for each interval of `inner`.
    """
    if len(outer) == 1 and outer[0].repeat == 1:
        shift = outer[0].offset
        if not shift:
            return inner
        return tuple([Run(run.offset + shift, run.size, run.stride, run.repeat) for run in inner])
    out: list[Run] = []
    for run in inner:
        _through(outer, run, out)
    return merged(tuple(out))


def _through(outer: Runs, run: Run, out: list[Run]) -> None:
    """Append what `run`, in local indices of `outer`, stands for."""
    start = 0
    end = run.offset + (run.repeat - 1) * run.stride + run.size
    for part in outer:
        stop = start + part.size * part.repeat
        if start <= run.offset and end <= stop and run.stride >= 0:
            _within(part, run._replace(offset=run.offset - start), out)
            return
        start = stop
    for offset, size in intervals((run,)):
        _clip(outer, offset, offset + size, out)


def _clip(outer: Runs, low: int, high: int, out: list[Run]) -> None:
    start = 0
    for part in outer:
        stop = start + part.size * part.repeat
        first, last = max(low, start), min(high, stop)
        if first < last:
            _within(part, Run(first - start, last - first, last - first, 1), out)
        start = stop


def _within(part: Run, run: Run, out: list[Run]) -> None:
    """Append what `run`, in local indices of the single run `part`, stands for."""
    if part.repeat == 1:
        out.append(run._replace(offset=part.offset + run.offset))
        return
    block, inside = divmod(run.offset, part.size)
    offset = part.offset + block * part.stride + inside
    if inside + (run.repeat - 1) * run.stride + run.size <= part.size:
        out.append(run._replace(offset=offset))
    elif inside + run.size <= part.size and run.stride % part.size == 0:
        out.append(Run(offset, run.size, run.stride // part.size * part.stride, run.repeat))
    elif run.repeat == 1:
        _spread(part, run.offset, run.offset + run.size, out)
    else:
        for low, size in intervals((run,)):
            _within(part, Run(low, size, size, 1), out)


def _spread(part: Run, low: int, high: int, out: list[Run]) -> None:
    """Local indices `[low, high)` of a periodic run: a head, whole blocks, a tail."""
    first, head = divmod(low, part.size)
    last, tail = divmod(high, part.size)
    if head:
        out.append(Run(part.offset + first * part.stride + head, part.size - head, part.size - head, 1))
        first += 1
    if last > first:
        out.append(Run(part.offset + first * part.stride, part.size, part.stride, last - first))
    if tail:
        out.append(Run(part.offset + last * part.stride, tail, tail, 1))
