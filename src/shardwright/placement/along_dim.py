"""Partitions of one dim: a subclass says which indices of that dim a coord holds, as runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

from shardwright.errors import PlacementError
from shardwright.index.assemble import check_dim
from shardwright.index.flat_region import FlatRegion
from shardwright.index.region import Region, Shape
from shardwright.index.runs import Runs, compose, interval, total
from shardwright.placement.base import Partition, check_counts


class AlongDim(Partition):
    """Splits the indices of `dim`; every other dim is whole on every coord."""

    any_size = True
    dim: int

    def runs(self, length: int, n: int, coord: int) -> Runs:  # noqa: ARG002 - for subclasses
        """The indices that `coord` of `n` holds of a dim of this length, in local order."""
        raise PlacementError(f"{type(self).__name__} does not say which indices a coord holds: define runs()")

    def local_length(self, length: int, n: int, coord: int) -> int:
        """How many indices `coord` holds."""
        return total(self.runs(length, n, coord))

    def moved(self, dim: int) -> Partition:
        """The same split of another dim, without checks."""
        return replace(self, dim=dim)  # type: ignore[type-var]

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """The runs of `dim`, all of every other dim."""
        dim = self._dim(len(shape))
        of_dim = self.runs(shape[dim], n, coord)
        whole = (interval(0, size) for size in shape)
        return Region.from_runs(tuple(of_dim if d == dim else kept for d, kept in enumerate(whole)))

    def within(self, region: Region, n: int, coord: int) -> Region:
        """The runs of `dim` through those of a product of runs; the other dims stay."""
        if isinstance(region, FlatRegion) and not region.first <= self.dim < region.last:
            return region.cut(self.dim, self.runs(region.local_shape[self.dim], n, coord))
        if region.runs is None:
            return super().within(region, n, coord)
        dim, shape = self.dim, list(region.local_shape)
        inner = self.runs(shape[dim], n, coord)
        shape[dim] = total(inner)
        runs = list(region.runs)
        runs[dim] = compose(runs[dim], inner)
        return Region.from_runs(tuple(runs), tuple(shape))

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:
        """`shape` with the length of `dim` on this coord."""
        dim = self.dim
        length = self.local_length(shape[dim], n, coord)
        return (*shape[:dim], length, *shape[dim + 1 :]) if dim != -1 else (*shape[:-1], length)

    def cut_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - the same for every shape
        """`dim`, whatever its size."""
        return (self.dim,)

    def touched_dims(self, shape: Shape, n: int) -> tuple[int, ...]:
        """`dim`."""
        return self.cut_dims(shape, n)

    def on_dim(self, dim: int) -> Partition | None:
        """The same split of `dim`."""
        return self if dim == self.dim else self.moved(dim)

    def on_dims(self, dims: dict[int, int]) -> Partition:
        """The same split of the dim that `self.dim` has become."""
        dim = dims.get(self.dim, self.dim)
        return self if dim == self.dim else self.moved(dim)

    def resolved(self, ndim: int) -> Partition:
        """The same split with `dim` counted from the front."""
        dim = self._dim(ndim)
        return self if dim == self.dim else self.moved(dim)

    def validate(self, shape: Shape, n: int) -> None:  # noqa: ARG002 - any axis size will do
        """The tensor must have the dim."""
        self._dim(len(shape))

    def _dim(self, ndim: int) -> int:
        """`dim` counted from the front. The text, for the error, may be long: it is made only then."""
        return self.dim if 0 <= self.dim < ndim else check_dim(self.dim, ndim, self.text())

    def text(self) -> str:
        """How the text of a layout names this placement: class and arguments."""
        return self._called()

    def _check_dim(self) -> None:
        if not isinstance(self.dim, int):
            raise PlacementError(f"{self.text()}: dim must be an integer, got {self.dim!r}")

    def _checked(self, name: str, value: Any, least: int) -> None:
        check_counts(self.text(), least, **{name: value})


def states_runs(part: Partition) -> TypeGuard[AlongDim]:
    """Does its class say itself which indices of its dim a coord holds, and no more than that?"""
    return isinstance(part, AlongDim) and type(part).region is AlongDim.region
