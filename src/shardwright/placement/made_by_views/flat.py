"""`Flat`: several dims flattened into one, which any partition cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shardwright.errors import PlacementError
from shardwright.index.assemble import check_dim, unravel
from shardwright.index.flat_region import FlatRegion
from shardwright.index.region import Box, Region, Shape
from shardwright.index.runs import Runs, interval, intervals, total
from shardwright.placement.base import Partition, check_source
from shardwright.placement.one_dim import held
from shardwright.placement.one_dim_form import along


class OfFlatDims(Partition):
    """A cut of `dims` flattened: locally the flat length on the last of them, and 1 on the others."""

    dims: tuple[int, ...]

    def cut_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - the same for every shape
        """`dims`."""
        return self.dims

    def touched_dims(self, shape: Shape, n: int) -> tuple[int, ...]:
        """`dims`."""
        return self.cut_dims(shape, n)

    def _length(self, shape: Shape) -> int:
        return prod(shape[dim] for dim in self.dims)

    def _local_shape(self, shape: Shape, length: int) -> Shape:
        sizes = [1 if dim in self.dims else size for dim, size in enumerate(shape)]
        sizes[self.dims[-1]] = length
        return tuple(sizes)


@dataclass(frozen=True, repr=False)
class Flat(OfFlatDims):
    """The row-major flattening of `dims`, in this order, cut like `source` cuts a 1-d tensor.

    `Ragged` of several dims is one of these.
    """

    dims: tuple[int, ...]
    source: Partition

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """What the source holds of the flat dim, in indices of the tensor."""
        runs = held(self.source, self._length(shape), n, coord)
        first, last = self.dims[0], self.dims[-1]
        if all(after == before + 1 for before, after in pairwise(self.dims)):
            before, after = ([interval(0, s) for s in part] for part in (shape[:first], shape[last + 1 :]))
            return FlatRegion(shape, first, last, (*before, runs, *after))
        return Region(self._scattered(shape, runs), self._local_shape(shape, total(runs)))

    def _scattered(self, shape: Shape, runs: Runs) -> Iterator[Box]:
        """Boxes in local order where the dims are no neighbours: one per row of the last of them."""
        flat = self.dims[-1]
        sizes = tuple(shape[dim] for dim in self.dims)
        outer = [dim for dim in range(flat) if dim not in self.dims]
        for position in range(prod(shape[dim] for dim in outer)):
            index = unravel(position, tuple(shape[dim] for dim in outer))
            for low, size in _rows(runs, sizes[-1]):
                offsets = dict(zip((*outer, *self.dims), (*index, *unravel(low, sizes)), strict=True))
                lengths = {**dict.fromkeys(offsets, 1), flat: size}
                yield Box(
                    tuple(offsets.get(dim, 0) for dim in range(len(shape))),
                    tuple(lengths.get(dim, extent) for dim, extent in enumerate(shape)),
                )

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:
        """The flat length on the last of `dims`, 1 on the others."""
        return self._local_shape(shape, self.source.local_shape((self._length(shape),), n, coord)[0])

    def flat_group(self) -> tuple[int, ...]:
        """`dims`."""
        return self.dims

    def on_dims(self, dims: dict[int, int]) -> Partition:
        """The same cut with dims renumbered; dims that became one are named once."""
        renumbered = tuple(dict.fromkeys(dims.get(dim, dim) for dim in self.dims))
        if len(renumbered) == 1:
            return along(self.source, renumbered[0]) or self
        return Flat(renumbered, self.source)

    def resolved(self, ndim: int) -> Flat:
        """The same cut with dims counted from the front."""
        dims = tuple(dim if 0 <= dim < ndim else check_dim(dim, ndim, self.text()) for dim in self.dims)
        return self if dims == self.dims else Flat(dims, self.source)

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return self._called()

    def validate(self, shape: Shape, n: int) -> None:
        """Distinct dims that the tensor has; the source must take the flat dim."""
        check_source(self.text(), self.source)
        if not self.dims:
            raise PlacementError(f"{self.text()}: name at least one dim")
        if len(set(self.resolved(len(shape)).dims)) != len(self.dims):
            raise PlacementError(f"{self.text()}: dims must be distinct")
        self.source.validate((self._length(shape),), n)


def _rows(runs: Runs, row: int) -> Iterator[tuple[int, int]]:
    """The intervals of runs, cut where a row of this length ends."""
    for offset, size in intervals(runs):
        low, stop = offset, offset + size
        while low < stop:
            high = min(stop, (low // row + 1) * row)
            yield low, high - low
            low = high
