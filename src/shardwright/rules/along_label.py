"""A partition along a label: the same cut, written for each tensor's dim that shows the label.

The cut of a label is a partition of a 1-d tensor as long as the label ("part"). On a plain dim it is the
same split of that dim. On a dim with several factors it is a placement of the whole dim, found among the
families and accepted only if its regions say exactly the same; nothing here knows a class of placements.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.index.runs import Runs, total
from shardwright.placement.base import Partition, Placement
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.one_dim import held, spread_runs
from shardwright.placement.one_dim_form import one_dim_form, placed_on
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.remember import remembered
from shardwright.rules.equation import Dim, Sizes, Slot


def place_label(slot: Slot, label: int, part: Partition, sizes: Sizes, n: int) -> Partition | None:
    """The placement of a tensor when `label` is cut like `part`; None if no placement says it."""
    found = slot.find(label)
    if found is None:
        return None
    dim, at = found
    entry = slot.dims[dim]
    if len(entry.factors) == 1:
        return placed_on(part, dim, slot.shape(sizes), n)
    outer, inner = entry.around(at, sizes)
    flat = lift(part, outer, sizes[label], inner, n)
    return None if flat is None else placed_on(flat, dim, slot.shape(sizes), n)


def labels_cut(slot: Slot, placement: Placement, sizes: Sizes, n: int) -> Iterator[tuple[int, Partition]]:
    """Each label that `placement` can be said to cut on this tensor, with the cut as a 1-d partition."""
    if not isinstance(placement, Partition):
        return
    form = one_dim_form(placement, slot.shape(sizes), n)
    if form is not None:
        yield from _labels_of(slot.dims[form[0]], form[1], sizes, n)


def _labels_of(dim: Dim, flat: Partition, sizes: Sizes, n: int) -> Iterator[tuple[int, Partition]]:
    for at, factor in enumerate(dim.factors):
        if factor.label < 0:
            continue
        if len(dim.factors) == 1:
            yield factor.label, flat
            return
        outer, inner = dim.around(at, sizes)
        part = lower(flat, outer, sizes[factor.label], inner, n)
        if part is not None:
            yield factor.label, part
            return


@remembered(4096)
def lift(part: Partition, outer: int, size: int, inner: int, n: int) -> Partition | None:
    """The 1-d placement of `outer * size * inner` elements that cuts only the middle factor, like `part`."""
    if outer * inner == 0:
        return part
    wanted = [_scaled(part, outer, size, inner, n, coord) for coord in range(n)]
    for candidate in _lifted(part, outer, size, n):
        if all(held(candidate, outer * size * inner, n, coord) == wanted[coord] for coord in range(n)):
            return candidate
    return None


def _lifted(part: Partition, outer: int, size: int, n: int) -> Iterator[Partition]:
    if outer != 1:
        yield Interleaved(0, outer)
        return
    yield part
    lengths = part_lengths(part, size, n)
    if sum(lengths) == size > 0:
        yield Ragged.of_lengths(lengths)


@remembered(4096)
def lower(flat: Partition, outer: int, size: int, inner: int, n: int) -> Partition | None:
    """The cut of the middle factor that `flat` makes of `outer * size * inner` elements, if it is one."""
    wanted = [held(flat, outer * size * inner, n, coord) for coord in range(n)]
    for part in _lowered(flat, size, inner, n, wanted):
        if all(_scaled(part, outer, size, inner, n, coord) == wanted[coord] for coord in range(n)):
            return part
    return None


def _lowered(flat: Partition, size: int, inner: int, n: int, wanted: list[Runs]) -> Iterator[Partition]:
    yield Shard(0)
    yield flat
    lengths = [total(runs) for runs in wanted]
    if size and inner and all(length % inner == 0 for length in lengths):
        units = tuple(length // inner for length in lengths)
        if sum(units) == size and len(units) == n:
            yield Ragged.of_lengths(units)


def _scaled(part: Partition, outer: int, size: int, inner: int, n: int, coord: int) -> Runs | None:
    """What the coord holds of the merged dim: its indices of the label, `inner` wide, `outer` times."""
    return spread_runs(held(part, size, n, coord), outer, size, inner)


@remembered(8192)
def part_lengths(part: Partition, size: int, n: int) -> tuple[int, ...]:
    """How long a label of this size is on each coord."""
    return tuple(part.local_shape((size,), n, coord)[0] for coord in range(n))
