"""`Interleaved(dim, chunks)`: a dim cut in runs, each run split over the axis. Fused qkv weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.index.region import Shape
from shardwright.index.runs import Run, Runs, merged
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import HeldBy
from shardwright.placement.shard import chunk_bounds


@dataclass(frozen=True, repr=False)
class Interleaved(AlongDim):
    """The dim is cut in `chunks` runs as `torch.chunk` does; each run is split over the axis like `Shard`.

    Coord i holds piece i of the first run, then piece i of the second, and so on. With `chunks` = the number
    of shards of a later axis this is torch's private strided shard.
    Args: dim: of the tensor, counted from the last if negative. chunks: 1 or more.
    Raises: PlacementError: either is no such number.
    """

    dim: int
    chunks: int

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            self._check_dim()
        self._checked("chunks", self.chunks, 1)

    def runs(self, length: int, n: int, coord: int) -> Runs:
        """One piece of each full run, periodic, then the piece of the short last run."""
        whole = -(-length // self.chunks)
        if not whole:
            return ()
        full, rest = divmod(length, whole)
        start, stop = chunk_bounds(whole, n, coord)
        low, high = chunk_bounds(rest, n, coord)
        last = Run(full * whole + low, high - low, high - low, 1)
        return merged((Run(start, stop - start, whole, full), last))

    @classmethod
    def names(cls, held: HeldBy, length: int, n: int) -> Iterable[Interleaved]:  # noqa: ARG003 - the runs say it
        """As many chunks as the period of coord 0 fits in."""
        first = held(0)[:1]
        return tuple(cls(0, -(-length // run.stride)) for run in first if run.repeat > 1)

    def even(self, shape: Shape, n: int) -> bool:
        """Whether the axis divides the runs and the rest."""
        length = shape[self.dim]
        whole = -(-length // self.chunks)
        return not whole or (whole % n == 0 and (length % whole) % n == 0)
