"""Regions one after another: what a coord of a later axis holds, in indices of an earlier tensor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, product
from math import prod
from operator import add

from shardwright.index.flat_region import FlatRegion
from shardwright.index.region import Box, Region, Shape, flat_boxes, joined
from shardwright.index.runs import compose


def compose_regions(outer: Region, inner: Region) -> Region:
    """`inner`, in indices of the local tensor of `outer`, in indices of the tensor that `outer` is of.

    Where both are products of index lists, dim by dim; otherwise box by box, each a few boxes of `outer`.
    """
    if not inner.numel:
        return Region((), inner.local_shape)
    if inner.runs is not None and outer.runs is not None:
        return Region.from_runs(tuple(map(compose, outer.runs, inner.runs)))
    if isinstance(outer, FlatRegion) and (flat := outer.then(inner)) is not None:
        return flat
    if outer.runs is not None and len(outer.boxes) == 1:
        return Region((_end(outer.boxes[0], box, 0) for box in inner.boxes), inner.local_shape)
    split = _split_point(outer, inner)
    head, inside = _heads(outer, split), _heads(inner, split)
    ends = list(accumulate(box.numel for box in head))
    intervals = _flat_intervals(inside, outer.local_shape[:split])
    boxes = [box for low, high in intervals for box in _flat_part(head, ends, low, high)]
    end = _end(outer.boxes[0], inner.boxes[0], split)
    kept = (Box(b.offset + end.offset, b.size + end.size) for b in joined(boxes))
    return Region(kept, inner.local_shape)


def _split_point(outer: Region, inner: Region) -> int:
    """From this dim on, all boxes of `outer` are whole and alike, and so are those of `inner`.

    These dims are composed on their own: the cost is then the number of pieces of the others.
    """
    dim = len(outer.local_shape)
    while dim and all(_alike(region, dim - 1) for region in (outer, inner)):
        if outer.boxes[0].size[dim - 1] != outer.local_shape[dim - 1]:
            break
        dim -= 1
    return dim


def _alike(region: Region, dim: int) -> bool:
    first = region.boxes[0]
    return all(
        box.offset[dim] == first.offset[dim] and box.size[dim] == first.size[dim] for box in region.boxes
    )


def _heads(region: Region, split: int) -> list[Box]:
    return [Box(box.offset[:split], box.size[:split]) for box in region.boxes]


def _end(outer: Box, inner: Box, split: int) -> Box:
    """The dims from `split` on: the inner interval moved by the outer offset."""
    return Box(tuple(map(add, outer.offset[split:], inner.offset[split:])), inner.size[split:])


def _flat_intervals(boxes: list[Box], shape: Shape) -> Iterator[tuple[int, int]]:
    """The elements of boxes as intervals of the row-major flattening of `shape`, touching ones joined."""
    start = end = 0
    for box in boxes:
        for low, high in _intervals_of_box(box, shape):
            if low == end:
                end = high
                continue
            if end > start:
                yield start, end
            start, end = low, high
    if end > start:
        yield start, end


def _intervals_of_box(box: Box, shape: Shape) -> Iterator[tuple[int, int]]:
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    split = len(shape)
    while split and box.size[split - 1] == shape[split - 1]:
        split -= 1
    split = max(split - 1, 0)
    length = prod(box.size[split:])
    base = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    for index in product(*(range(size) for size in box.size[:split])):
        low = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield low, low + length


def _flat_part(boxes: list[Box], ends: list[int], low: int, high: int) -> Iterator[Box]:
    """Elements `[low, high)` of boxes in a row, of which each ends at `ends`, as boxes."""
    first = bisect_right(ends, low)
    while low < high:
        box = boxes[first]
        begin = ends[first] - box.numel
        stop = min(high, ends[first])
        for part in flat_boxes(box.size, low - begin, stop - begin):
            yield Box(tuple(map(add, part.offset, box.offset)), part.size)
        low, first = stop, first + 1
