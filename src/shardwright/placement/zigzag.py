"""`ZigZag(dim)`: a piece from the front and its mirror image. Balances causal attention over a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.index.region import Shape
from shardwright.index.runs import Runs, interval, merged
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import HeldBy
from shardwright.placement.shard import chunk_bounds


@dataclass(frozen=True, repr=False, init=False)
class ZigZag(AlongDim):
    """The dim is cut in 2n pieces as `torch.chunk` does; coord i holds pieces i and 2n - 1 - i.

    Args: dim: of the tensor, counted from the last if negative.
    Raises: PlacementError: it is no number.
    """

    dim: int

    def __init__(self, dim: int) -> None:
        object.__setattr__(self, "dim", dim)
        if type(self.dim) is not int:
            self._check_dim()

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """Two intervals; one where they touch or the second is empty."""
        first = interval(*chunk_bounds(length, 2 * n, coord))
        return merged(first + interval(*chunk_bounds(length, 2 * n, 2 * n - 1 - coord)))

    @classmethod
    def names(cls, held: HeldBy, length: int, n: int) -> Iterable[ZigZag]:  # noqa: ARG003 - the runs say it
        """The one of dim 0, for two intervals."""
        return (cls(0),) if len(held(0)) in {1, 2} else ()

    def even(self, shape: Shape, n: int) -> bool:
        """Whether 2n divides the dim, or each coord has one index of it."""
        length = shape[self.dim]
        return length % (2 * n) == 0 or n in (1, length)
