"""`Imaged`: what a view sees of a partition, element by element. The form for views that no formula says."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlacementError
from shardwright.index.region import Region, Shape
from shardwright.index.runs import Runs
from shardwright.index.view import View
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, check_source
from shardwright.placement.one_dim import held, runs_of_indices
from shardwright.placement.shard import Shard
from shardwright.remember import remembered

Indices = NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class Imaged(AlongDim):
    """A dim whose index is a place in the flattened `target`, each where `source` puts the element it is.

    `source` is a partition of a tensor of this `shape`; `base` and `rows` say which element of it an element
    of `target` is (see `View`). Local order is ascending. A dim of any other length is cut like `Shard`.
    """

    any_size = False

    dim: int
    source: Partition
    target: Shape
    shape: Shape
    base: Shape = ()
    rows: tuple[Shape, ...] | None = None

    @property
    def picks(self) -> View:
        """Which element is which."""
        return View(self.shape, self.target, self.base, self.rows)

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
        if not self.picks.is_inside:
            raise PlacementError(f"{self.text()}: a tensor of {self.shape} has not what it names")
        self.source.validate(self.shape, n)


@remembered(4096)
def _image(source: Partition, picks: View, n: int, coord: int) -> tuple[Runs, Indices]:
    seen = local_places(source.region(picks.source, n, coord), picks.source)[picks.places()]
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
