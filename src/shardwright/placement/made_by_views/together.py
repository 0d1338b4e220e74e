"""`Together`: what neighbouring coords of a finer cut hold, on one coord."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.index.region import Region, Shape
from shardwright.placement.base import Partition, check_counts, check_source


@dataclass(frozen=True, repr=False)
class Together(Partition):
    """Coord i of n holds what coords `i * each` up to `(i + 1) * each` of `n * each` hold of `source`.

    What is left of axes that cut a tensor together when the inner ones have been gathered. Parts that differ
    in their indices of one dim are joined along it, one after the other; others lie flat in the last dim.
    """

    source: Partition
    each: int

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """The regions of the source's coords, in their order."""
        parts = [self.source.region(shape, n * self.each, coord * self.each + i) for i in range(self.each)]
        return parts[0] if len(parts) == 1 else _along_a_dim(parts) or _flat(parts, len(shape))

    def on_dims(self, dims: dict[int, int]) -> Partition:
        """The same cut with dims renumbered."""
        return Together(self.source.on_dims(dims), self.each)

    def resolved(self, ndim: int) -> Partition:
        """The same cut with dims counted from the front."""
        return Together(self.source.resolved(ndim), self.each)

    def flat_group(self) -> tuple[int, ...]:
        """The dims that the source flattens."""
        return self.source.flat_group()

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return self._called()

    def validate(self, shape: Shape, n: int) -> None:
        """The source must take the tensor on so many coords."""
        check_source(self.text(), self.source)
        check_counts(self.text(), 1, each=self.each)
        self.source.validate(shape, n * self.each)


def _along_a_dim(parts: Sequence[Region]) -> Region | None:
    runs = [part.runs for part in parts]
    if any(of_part is None for of_part in runs):
        return None
    by_dim = list(zip(*(of_part for of_part in runs if of_part is not None), strict=True))
    differ = [dim for dim, of_dim in enumerate(by_dim) if any(each != of_dim[0] for each in of_dim)]
    if len(differ) != 1:
        return None
    joined = [of_dim[0] for of_dim in by_dim]
    joined[differ[0]] = tuple(run for of_part in by_dim[differ[0]] for run in of_part)
    return Region.from_runs(tuple(joined))


def _flat(parts: Sequence[Region], ndim: int) -> Region:
    total = sum(prod(part.local_shape) for part in parts)
    if not ndim:
        return Region((box for part in parts for box in part.boxes), () if total else (0,))
    return Region((box for part in parts for box in part.boxes), (*(1,) * (ndim - 1), total))
