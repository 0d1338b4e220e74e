"""`BlockCyclic(dim, block)`: blocks of a dim dealt out in turn. The layout of ScaLAPACK."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.index.region import Shape
from shardwright.index.runs import Run, Runs, merged
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import HeldBy


@dataclass(frozen=True, repr=False)
class BlockCyclic(AlongDim):
    """Block b (of `block` indices, the last one short) belongs to coord b % n.

    Args: dim: of the tensor, counted from the last if negative. block: indices, 1 or more.
    Raises: PlacementError: either is no such number.
    """

    dim: int
    block: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            self._check_dim()
        self._checked("block", self.block, 1)

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """Full rounds, periodic, then the block of the last round."""
        rounds, rest = divmod(length, n * self.block)
        last = min(max(rest - coord * self.block, 0), self.block)
        start = coord * self.block
        tail = Run(rounds * n * self.block + start, last, last, 1)
        return merged((Run(start, self.block, n * self.block, rounds), tail))

    @classmethod
    def names(cls, held: HeldBy, length: int, n: int) -> Iterable[BlockCyclic]:  # noqa: ARG003 - the runs say it
        """Blocks as long as the first one of coord 0."""
        first = held(0)
        return (cls(0, first[0].size),) if len(first) in {1, 2} else ()

    def even(self, shape: Shape, n: int) -> bool:
        """Whether the rounds are full."""
        return n == 1 or shape[self.dim] % (n * self.block) == 0
