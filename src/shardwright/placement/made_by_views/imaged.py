"""`Imaged`: what a view sees of a partition, element by element. The form for views that no formula says."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlacementError
from shardwright.index.region import Region, Shape
from shardwright.index.runs import Runs
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, check_source
from shardwright.placement.one_dim import held, runs_of_indices
from shardwright.placement.shard import Shard
from shardwright.remember import remembered

Indices = NDArray[np.int64]

# Elements of the dims that a view mixes; more would cost gigabytes of index tables.
MANY = 1 << 27


@dataclass(frozen=True, slots=True)
class Picks:
    """Which element of the dims `source` each element of the dims `target` is.

    Index i of target is `base[d] + sum(rows[d][e] * i[e])` on dim d of source; without rows, the element at
    the same place of the row-major flattening.
    """

    target: Shape
    source: Shape
    base: Shape = ()
    rows: tuple[Shape, ...] | None = None

    @property
    def inside(self) -> bool:
        """Whether each element of `target` is an element of `source`."""
        if self.rows is None:
            return prod(self.target) == prod(self.source)
        if not len(self.base) == len(self.rows) == len(self.source):
            return False
        if any(len(row) != len(self.target) for row in self.rows):
            return False
        return not prod(self.target) or all(
            low >= 0 and high < size
            for (low, high), size in zip(map(self._bounds, range(len(self.base))), self.source, strict=True)
        )

    def _bounds(self, dim: int) -> tuple[int, int]:
        """The smallest and the largest index on a dim of source."""
        row = () if self.rows is None else self.rows[dim]
        steps = [step * (size - 1) for step, size in zip(row, self.target, strict=True)]
        low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
        return self.base[dim] + low, self.base[dim] + high

    def flat(self) -> Indices:
        """Per target element, row-major, the place of its source element in the flattened source.

        Raises: PlacementError: there are too many.
        """
        if max(prod(self.target), prod(self.source)) > MANY:
            raise PlacementError(f"a view mixes dims of sizes {self.source}: too many elements to list")
        if self.rows is None:
            return np.arange(prod(self.target))
        stride = [prod(self.source[dim + 1 :]) for dim in range(len(self.source))]
        found = np.full(self.target, sum(b * s for b, s in zip(self.base, stride, strict=True)))
        for at, size in enumerate(self.target):
            step = sum(row[at] * s for row, s in zip(self.rows, stride, strict=True))
            sizes = [1] * len(self.target)
            sizes[at] = size
            found = found + (np.arange(size) * step).reshape(sizes)
        return found.reshape(-1)


@dataclass(frozen=True, repr=False)
class Imaged(AlongDim):
    """A dim whose index is a place in the flattened `target`, each where `source` puts the element it is.

    `source` is a partition of a tensor of this `shape`; `base` and `rows` say which element of it an element
    of `target` is (see `Picks`). Local order is ascending. A dim of any other length is cut like `Shard`.
    """

    any_size = False

    dim: int
    source: Partition
    target: Shape
    shape: Shape
    base: Shape = ()
    rows: tuple[Shape, ...] | None = None

    @property
    def picks(self) -> Picks:
        """Which element is which."""
        return Picks(self.target, self.shape, self.base, self.rows)

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """The elements that the source puts on this coord."""
        if length != prod(self.target):
            return held(Shard(0), length, n, coord)
        return _image(self.source, self.picks, n, coord)[0]

    def positions(self, n: int, coord: int) -> Indices:
        """Per element held, its place in the row-major flattening of the source's local tensor."""
        return _image(self.source, self.picks, n, coord)[1]

    def validate(self, shape: Shape, n: int) -> None:
        """Every element of `target` must be one of the source, which must be a partition of its shape."""
        super().validate(shape, n)
        check_source(self.text(), self.source)
        if not self.picks.inside:
            raise PlacementError(f"{self.text()}: a tensor of {self.shape} has not what it names")
        self.source.validate(self.shape, n)


@remembered(4096)
def _image(source: Partition, picks: Picks, n: int, coord: int) -> tuple[Runs, Indices]:
    seen = local_places(source.region(picks.source, n, coord), picks.source)[picks.flat()]
    found = np.flatnonzero(seen >= 0)
    return runs_of_indices(found.tolist()), seen[found]


def local_places(region: Region, shape: Shape) -> Indices:
    """Per element of a tensor, row-major, its place in the local tensor of a region; -1: not held."""
    places = np.full(shape, -1, dtype=np.int64)
    start = 0
    for box in region.boxes:
        places[box.slices] = np.arange(start, start + box.numel).reshape(box.size)
        start += box.numel
    return places.reshape(-1)
