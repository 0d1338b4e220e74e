"""A view as data: which element of its source each element of the target is."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlacementError
from shardwright.index.region import Shape
from shardwright.index.stride import contiguous_stride
from shardwright.remember import remembered

# Elements of which places are listed; of more, the tables would take gigabytes.
_MANY = 1 << 27


@dataclass(frozen=True, slots=True)
class View:
    """Index i of `target` is the element `base[d] + sum(rows[d][e] * i[e])` on dim d of `source`.

    Without rows it is the element at the same place of the row-major order: a reshape.
    """

    source: Shape
    target: Shape
    base: Shape = ()
    rows: tuple[Shape, ...] | None = None

    @property
    def empty(self) -> bool:
        """Whether it sees no element."""
        return 0 in self.target

    @property
    def nothing_changes(self) -> bool:
        """Whether it is the source as it is."""
        return self.source == self.target and self == identity(self.source)

    def targets_of(self, dim: int) -> tuple[int, ...]:
        """The target dims whose index tells that of a source dim."""
        if self.rows is not None:
            return tuple([e for e, step in enumerate(self.rows[dim]) if step])
        return next((target for source, target in self.blocks() if dim in source), ())

    def blocks(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of a reshape: the dims of source and target that are made of each other, in order."""
        found, i, j = [], 0, 0
        for own, other in neighbours(self.source, self.target):
            found.append((tuple(range(i, i + len(own))), tuple(range(j, j + len(other)))))
            i, j = i + len(own), j + len(other)
        return found

    def keeps(self, dim: int) -> int | None:
        """The target dim that is this source dim as it is; None if there is none."""
        targets = self.targets_of(dim)
        if len(targets) != 1 or self.source[dim] != self.target[targets[0]]:
            return None
        if self.rows is None:
            block = next(source for source, _ in self.blocks() if dim in source)
            return targets[0] if len(block) == 1 else None
        alone = sum(1 for row in self.rows if row[targets[0]]) == 1
        return targets[0] if alone and self.base[dim] == 0 and self.rows[dim][targets[0]] == 1 else None

    @property
    def is_inside(self) -> bool:
        """Whether each element of the target is an element of the source."""
        if self.rows is None:
            return prod(self.target) == prod(self.source)
        if not len(self.base) == len(self.rows) == len(self.source):
            return False
        if any(len(row) != len(self.target) for row in self.rows):
            return False
        bounds = [self._bounds(first, row) for first, row in zip(self.base, self.rows, strict=True)]
        inside = all(low >= 0 and high < size for (low, high), size in zip(bounds, self.source, strict=True))
        return self.empty or inside

    def _bounds(self, first: int, row: Shape) -> tuple[int, int]:
        """The smallest and the largest index on a dim of the source."""
        steps = [step * (size - 1) for step, size in zip(row, self.target, strict=True)]
        return first + sum(min(step, 0) for step in steps), first + sum(max(step, 0) for step in steps)

    def places(self) -> NDArray[np.int64]:
        """Per target element, row-major, the place of its source element in the flattened source.

        Raises: PlacementError: there are too many.
        """
        if max(prod(self.target), prod(self.source)) > _MANY:
            raise PlacementError(f"a view mixes dims of sizes {self.source}: too many elements to list")
        if self.rows is None:
            return np.arange(prod(self.target))
        stride = contiguous_stride(self.source)
        found = np.full(self.target, sum(b * s for b, s in zip(self.base, stride, strict=True)))
        for at, size in enumerate(self.target):
            step = sum(row[at] * s for row, s in zip(self.rows, stride, strict=True))
            sizes = [1] * len(self.target)
            sizes[at] = size
            found = found + (np.arange(size) * step).reshape(sizes)
        return found.reshape(-1)


def identity(shape: Shape) -> View:
    """Every element as it is."""
    return View(shape, shape, (0,) * len(shape), _unit_rows(len(shape)))


@remembered(64)
def _unit_rows(ndim: int) -> tuple[Shape, ...]:
    return tuple(tuple(int(e == d) for e in range(ndim)) for d in range(ndim))


def permuted(shape: Shape, dims: tuple[int, ...]) -> View:
    """Dim e of the target is dim `dims[e]` of the source."""
    rows = tuple(tuple(int(dims[e] == d) for e in range(len(dims))) for d in range(len(shape)))
    return View(shape, tuple(shape[d] for d in dims), (0,) * len(shape), rows)


def reshaped(source: Shape, target: Shape) -> View:
    """The same elements in row-major order."""
    return View(source, target)


def sliced(shape: Shape, dim: int, start: int, step: int, length: int) -> View:
    """`length` indices of a dim, from `start`, `step` apart."""
    whole = identity(shape)
    target = (*shape[:dim], length, *shape[dim + 1 :])
    return View(shape, target, _with(whole.base, dim, start), _scaled(whole.rows or (), dim, step))


def selected(shape: Shape, dim: int, index: int) -> View:
    """One index of a dim, which vanishes."""
    whole = identity(shape)
    rows = tuple((*row[:dim], *row[dim + 1 :]) for row in whole.rows or ())
    return View(shape, (*shape[:dim], *shape[dim + 1 :]), _with(whole.base, dim, index), rows)


def inserted(shape: Shape, dim: int) -> View:
    """A new dim of size 1 before dim `dim`."""
    rows = tuple((*row[:dim], 0, *row[dim:]) for row in _unit_rows(len(shape)))
    return View(shape, (*shape[:dim], 1, *shape[dim:]), (0,) * len(shape), rows)


def expanded(shape: Shape, target: Shape) -> View:
    """New dims in front, and dims of size 1 that are repeated."""
    added = len(target) - len(shape)
    rows = [[0] * len(target) for _ in shape]
    for dim, size in enumerate(shape):
        rows[dim][added + dim] = int(size == target[added + dim])
    return View(shape, target, (0,) * len(shape), tuple(map(tuple, rows)))


def unfolded(shape: Shape, dim: int, size: int, step: int) -> View:
    """Windows of a dim; what is in a window is the last dim."""
    if not shape:
        return reshaped((), (size,))
    windows = (shape[dim] - size) // step + 1
    target = (*shape[:dim], windows, *shape[dim + 1 :], size)
    rows = [[int(d == e) for e in range(len(target))] for d in range(len(shape))]
    rows[dim][dim], rows[dim][-1] = step, 1
    return View(shape, target, (0,) * len(shape), tuple(map(tuple, rows)))


def diagonal(shape: Shape, offset: int, dim1: int, dim2: int, length: int) -> View:
    """The diagonal of two dims is the last dim."""
    rest = [d for d in range(len(shape)) if d not in {dim1, dim2}]
    target = (*(shape[d] for d in rest), length)
    rows = [[0] * len(target) for _ in shape]
    for at, d in enumerate(rest):
        rows[d][at] = 1
    rows[dim1][-1] = rows[dim2][-1] = 1
    base = [0] * len(shape)
    base[dim1], base[dim2] = max(-offset, 0), max(offset, 0)
    return View(shape, target, tuple(base), tuple(map(tuple, rows)))


def strided(source: Shape, own: Shape, target: Shape, stride: Shape, offset: int) -> View | None:
    """`as_strided` of a tensor that lies with strides `own`; None if an index would carry into another dim.

    Memory places are read as indices: by the dims of the source with the largest stride first.
    """
    if 0 in target:
        return View(source, target, (0,) * len(source), ((0,) * len(target),) * len(source))
    if offset < 0 or 0 in source:
        return None
    order = sorted((d for d, size in enumerate(source) if size > 1), key=lambda d: -own[d])
    base, left = [0] * len(source), offset
    for d in order:
        base[d], left = divmod(left, own[d]) if own[d] else (0, left)
    rows = [[0] * len(target) for _ in source]
    for e, size in enumerate(target):
        step = stride[e] if size > 1 else 0
        for d in order:
            if own[d] and step:
                rows[d][e], step = divmod(step, own[d])
        if step:
            return None
    if any(
        base[d] + sum(row[e] * (size - 1) for e, size in enumerate(target)) >= source[d]
        for d, row in enumerate(rows)
    ):
        return None
    return None if left else View(source, target, tuple(base), tuple(map(tuple, rows)))


def _with(base: Shape, dim: int, value: int) -> Shape:
    return (*base[:dim], value, *base[dim + 1 :])


def _scaled(rows: tuple[Shape, ...], dim: int, step: int) -> tuple[Shape, ...]:
    return (*rows[:dim], tuple([v * step for v in rows[dim]]), *rows[dim + 1 :])


def neighbours(
    source: tuple[int, ...], target: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shortest runs of dims with the same number of elements on both sides, in order.

    Without elements no product tells where a run ends: leading dims that agree, and the rest as one.
    """
    runs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    i = j = 0
    if 0 in source:
        same = leading(source, target)
        runs = [((size,), (size,)) for size in source[:same]]
        rest = source[same:], target[same:]
        return [*runs, rest] if any(rest) else runs
    while i < len(source) or j < len(target):
        start_i, start_j = i, j
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        one, two = prod(source[start_i:i]), prod(target[start_j:j])
        while one != two:
            if (one < two and i < len(source)) or j == len(target):
                one, i = one * source[i], i + 1
            else:
                two, j = two * target[j], j + 1
        runs.append((source[start_i:i], target[start_j:j]))
    return runs


def leading(source: tuple[int, ...], target: tuple[int, ...]) -> int:
    """How many leading dims agree."""
    same = 0
    while same < min(len(source), len(target)) and source[same] == target[same]:
        same += 1
    return same
