"""`Moved`: the cut that a partition makes of one dim, along any dim."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import PlacementError
from shardwright.index.region import Shape
from shardwright.index.runs import Runs
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, check_counts, check_source
from shardwright.placement.one_dim import held_along


@dataclass(frozen=True, repr=False)
class Moved(AlongDim):
    """A dim that is cut like `source` cuts dim `at` of a tensor of `ndim` dims whose other dims are 1.

    What rules and views make of a partition that says its region and nothing else.
    """

    any_size = False

    dim: int
    source: Partition
    ndim: int
    at: int

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """The source's indices of that dim."""
        return held_along(self.source.region(self._shape(length), n, coord), self.at)

    def _shape(self, length: int) -> Shape:
        return tuple(length if dim == self.at else 1 for dim in range(self.ndim))

    def validate(self, shape: Shape, n: int) -> None:
        """The source must take such a tensor, and cut only that dim of it."""
        super().validate(shape, n)
        check_source(self.text(), self.source)
        check_counts(self.text(), 1, ndim=self.ndim)
        check_counts(self.text(), 0, at=self.at)
        if self.at >= self.ndim:
            raise PlacementError(f"{self.text()}: a tensor of {self.ndim} dims has no dim {self.at}")
        length = shape[self._dim(len(shape))]
        self.source.validate(self._shape(length), n)
        if length and not set(self.source.cut_dims(self._shape(length), n)) <= {self.at}:
            raise PlacementError(f"{self.text()}: {self.source} does not cut dim {self.at} alone")
