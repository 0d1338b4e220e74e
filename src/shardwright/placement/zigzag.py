"""`ZigZag(dim)`: a piece from the front and its mirror image. Balances causal attention over a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.index.runs import Runs, interval, merged
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.shard import chunk_bounds

if TYPE_CHECKING:
    from shardwright.index.region import Shape


@dataclass(frozen=True, repr=False)
class ZigZag(AlongDim):
    """The dim is cut in 2n pieces as `torch.chunk` does; coord i holds pieces i and 2n - 1 - i."""

    dim: int

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """Two intervals; one where they touch or the second is empty."""
        first = interval(*chunk_bounds(length, 2 * n, coord))
        return merged(first + interval(*chunk_bounds(length, 2 * n, 2 * n - 1 - coord)))

    def even(self, shape: Shape, n: int) -> bool:
        """Whether 2n divides the dim, or each coord has one index of it."""
        length = shape[self.dim]
        return length % (2 * n) == 0 or n in (1, length)
