"""Whether regions are those of a partition: inside the tensor, disjoint, and all of it.

For regions that somebody else states. The cost is that of their boxes, never that of the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardwright.index.region import Region, Shape
from shardwright.index.runs import intervals

Indices = NDArray[np.int64]

# Cells of a grid that are counted at once; of more, halves are looked at.
_CELLS = 1 << 16
# Elements among which the one that is missing is searched for the message.
_FEW = 1 << 22


def no_partition(regions: Sequence[object], shape: Shape) -> str | None:
    """What keeps regions, one per coord, from being a partition of a tensor of this shape; None if nothing.

    Cost: O(boxes), times their logarithm where they lie across each other.
    """
    boxes: list[tuple[Shape, Shape]] = []
    for coord, region in enumerate(regions):
        broken = _unfit(region, shape, boxes)
        if broken:
            return f"coord {coord}: {broken}"
    held = sum(prod(size) for _, size in boxes)
    if not shape:
        return None if held == 1 else f"its only element is held {_times(held)}"
    starts = np.array([offset for offset, _ in boxes], dtype=np.int64).reshape(-1, len(shape))
    ends = starts + np.array([size for _, size in boxes], dtype=np.int64).reshape(-1, len(shape))
    if held == prod(shape) and not _overlap(starts, ends):
        return None
    return _wrong_element(starts, ends, shape) or f"its coords hold {held} elements, some of them twice"


def _unfit(region: object, shape: Shape, boxes: list[tuple[Shape, Shape]]) -> str | None:
    """What is wrong with one region by itself; what it holds is appended to `boxes`."""
    if not isinstance(region, Region):
        return f"region() gave {region!r:.200}, not a Region"
    local = region.local_shape
    if not _whole_numbers(local):
        return f"its local shape {local!r:.200} is not made of integers >= 0"
    if len(local) != len(shape) and not (shape == () and local == (0,)):
        return f"its local shape {local} has not {len(shape)} dims, as the tensor has"
    held = 0
    for offset, size in _boxes(region):
        if len(offset) != len(shape) or len(size) != len(shape):
            return f"its box at {offset} of size {size} has not {len(shape)} dims"
        if not _whole_numbers(size) or not _whole_numbers(offset, negative=True):
            return f"its box at {offset} of size {size} is not made of integers"
        if any(o < 0 or o + s > end for o, s, end in zip(offset, size, shape, strict=True)):
            return f"its box at {offset} of size {size} leaves the tensor"
        boxes.append((offset, size))
        held += prod(size)
    return None if held == prod(local) else f"its boxes hold {held} elements, its local shape is {local}"


def _boxes(region: Region) -> Iterator[tuple[Any, Any]]:
    """Offset and size of what a region holds, in no order; of a product, one per cell."""
    if region.runs is None:
        return ((box.offset, box.size) for box in region.boxes)
    sides = [list(intervals(of_dim)) for of_dim in region.runs]
    cells = (tuple(zip(*cell, strict=True)) or ((), ()) for cell in product(*sides))
    return ((offset, size) for offset, size in cells)


def _whole_numbers(values: Any, *, negative: bool = False) -> bool:
    try:
        whole = all(negative or value >= 0 for value in map(index, values))
        return whole and not any(isinstance(value, Tensor) for value in values)  # which an op would take
    except TypeError:
        return False


def _times(count: int) -> str:
    return "by no coord" if not count else "more than once"


def _overlap(starts: Indices, ends: Indices) -> bool:
    """Whether two boxes share an element. Counted on the grid that their edges make, or in its halves."""
    if len(starts) < 2:
        return False
    edges = [np.unique((starts[:, dim], ends[:, dim])) for dim in range(starts.shape[1])]
    if prod(len(of_dim) - 1 for of_dim in edges) <= max(_CELLS, 4 * len(starts)):
        return bool(_counts(starts, ends, edges).max() > 1)
    dim = max(range(len(edges)), key=lambda dim: len(edges[dim]))
    middle = edges[dim][len(edges[dim]) // 2]
    low, high = starts[:, dim] < middle, ends[:, dim] > middle
    below, above = ends[low].copy(), starts[high].copy()
    below[:, dim] = np.minimum(below[:, dim], middle)
    above[:, dim] = np.maximum(above[:, dim], middle)
    return _overlap(starts[low], below) or _overlap(above, ends[high])


def _counts(starts: Indices, ends: Indices, edges: Sequence[Indices]) -> Indices:
    """How many boxes lie on each cell of the grid: one step up where a box starts, one down where it ends."""
    corners = [
        (np.searchsorted(of_dim, starts[:, dim]), np.searchsorted(of_dim, ends[:, dim]))
        for dim, of_dim in enumerate(edges)
        if len(of_dim) > 2  # along any other dim all boxes are alike
    ]
    if not corners:
        return np.array(len(starts))
    counts = np.zeros([len(of_dim) for of_dim in edges if len(of_dim) > 2], dtype=np.int64)
    for which in product((0, 1), repeat=len(corners)):
        at = tuple(corner[side] for side, corner in zip(which, corners, strict=True))
        np.add.at(counts, at, (-1) ** sum(which))
    for dim in range(counts.ndim):
        counts = counts.cumsum(dim)
    return counts


def _wrong_element(starts: Indices, ends: Indices, shape: Shape) -> str | None:
    """An element that is not held once, of a tensor of few."""
    if prod(shape) > _FEW:
        return None
    held = np.zeros(shape, dtype=np.int64)
    for start, end in zip(starts, ends, strict=True):
        held[tuple(map(slice, start, end))] += 1
    for wrong in (held == 0, held > 1):
        if wrong.any():
            found = tuple(int(at) for at in np.argwhere(wrong)[0])
            return f"element {found} is held {_times(int(held[found]))}"
    return None
