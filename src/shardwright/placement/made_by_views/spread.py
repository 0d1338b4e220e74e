"""`Spread`: a cut of the middle factor of a dim, the outer factor repeating it and the inner one whole."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import PlacementError
from shardwright.index.region import Shape
from shardwright.index.runs import Runs
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, check_counts, check_source
from shardwright.placement.one_dim import held, spread_runs


@dataclass(frozen=True, repr=False)
class Spread(AlongDim):
    """A dim of `outer * size * inner` indices that is cut like `source` cuts the factor `size`.

    Made by views that merge dims. A dim of any other length is cut as `source` cuts it.
    """

    any_size = False

    dim: int
    source: Partition
    outer: int
    size: int
    inner: int

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """The source's indices, `inner` wide, `outer` times."""
        if length != self.outer * self.size * self.inner:
            return held(self.source, length, n, coord)
        found = spread_runs(held(self.source, self.size, n, coord), self.outer, self.size, self.inner)
        if found is None:
            raise PlacementError(f"{self.text()}: a coord holds too many pieces to write down")
        return found

    def validate(self, shape: Shape, n: int) -> None:
        """Three factors, and a source that takes the middle one."""
        super().validate(shape, n)
        check_source(self.text(), self.source)
        check_counts(self.text(), 0, outer=self.outer, size=self.size, inner=self.inner)
        self.source.validate((self.size,), n)
