"""`Sliced`: the part of a cut dim that a slice leaves, every index where it was."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import PlacementError
from shardwright.index.region import Shape
from shardwright.index.runs import Runs
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, check_counts, check_source
from shardwright.placement.one_dim import held, sliced_runs


@dataclass(frozen=True, repr=False)
class Sliced(AlongDim):
    """Index j is where `source` puts index `start + j * step` of a dim of length `of`; `length` of them.

    Made by views (`x[3:7]` of a cut dim), not written by hand. `source` is a partition of a 1-d tensor. A dim
    of any other length is cut as `source` cuts it, so that this is a partition of every tensor.
    """

    any_size = False

    dim: int
    source: Partition
    of: int
    start: int
    step: int
    length: int

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """The source's indices that the slice picks, counted in the slice."""
        if length != self.length:
            return held(self.source, length, n, coord)
        return sliced_runs(held(self.source, self.of, n, coord), self.start, self.step, length)

    def validate(self, shape: Shape, n: int) -> None:
        """The slice must lie inside the dim that it is of, and the source take that dim."""
        super().validate(shape, n)
        check_source(self.text(), self.source)
        check_counts(self.text(), 0, of=self.of, start=self.start, length=self.length)
        check_counts(self.text(), 1, step=self.step)
        last = self.start + (self.length - 1) * self.step
        if self.length and last >= self.of:
            raise PlacementError(f"{self.text()}: index {last} is outside the dim of {self.of}")
        self.source.validate((self.of,), n)
