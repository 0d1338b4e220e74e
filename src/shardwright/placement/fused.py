"""`Fused(dim, parts, units)`: several matrices in one dim, each of them cut. Queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.errors import PlacementError
from shardwright.index.runs import Run, Runs, interval, merged
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.ragged import counts_of, share_bounds
from shardwright.placement.shard import chunk_bounds


@dataclass(frozen=True, repr=False, init=False)
class Fused(AlongDim):
    """The dim is runs in the proportion of `parts`; coord i holds share i of each run in turn.

    A run is `parts[j]` pieces of ceil(length / sum(parts)), clamped at the end. It is shared as `Shard` does,
    or, where `units` are given, as `Ragged(units)` does: heads that the axis does not divide.
    `Fused(d, (1,) * k)` is `Interleaved(d, k)`.

    Args: dim: of the tensor. parts: a number for each run. units: one count per coord, zeros allowed.
    Raises: PlacementError: they are no such numbers.
    """

    dim: int
    parts: tuple[int, ...]
    units: tuple[int, ...] | None

    def __init__(self, dim: int, parts: Iterable[int], units: Iterable[int] | None = None) -> None:
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "parts", counts_of("Fused", "parts", parts))
        object.__setattr__(self, "units", None if units is None else counts_of("Fused", "units", units))
        self._check_dim()

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """One share of each part."""
        piece = -(-length // sum(self.parts))
        found: list[Run] = []
        start = 0
        for part in self.parts:
            stop = min(start + part * piece, length)
            low, high = self._share(stop - start, n, coord)
            found += interval(start + low, start + high)
            start = stop
        return merged(tuple(found))

    def _share(self, length: int, n: int, coord: int) -> tuple[int, int]:
        """Start and stop of the share of `coord` in one part of this length."""
        if self.units is None:
            return chunk_bounds(length, n, coord)
        return share_bounds(self.units, length, coord)

    def moved(self, dim: int) -> Fused:
        """The same split of another dim."""
        return Fused(dim, self.parts, self.units)

    def validate(self, shape: tuple[int, ...], n: int) -> None:
        """The tensor must have the dim, and the units must be those of this axis."""
        super().validate(shape, n)
        if self.units is not None and len(self.units) != n:
            raise PlacementError(f"{self.text()}: {len(self.units)} unit counts for an axis of size {n}")
