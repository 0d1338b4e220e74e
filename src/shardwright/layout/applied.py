"""The placements of a layout in the order in which they act, each on what the earlier ones left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright.placement.base import Partition, Pending

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardwright.placement.base import Placement
    from shardwright.placement.region import Region, Shape


@dataclass(frozen=True, slots=True)
class Applied:
    """One placement on one axis, its dims counted in the tensor that the earlier axes left.

    A coord of an `Owner` that holds nothing of a 0-d tensor has shape (0,): later placements leave it alone.
    """

    axis: int
    size: int
    placement: Placement
    partition: Partition | None  # the placement, if it decides which elements a coord holds
    pending: Pending | None  # the placement, if it reduces
    ndim: int

    def _cuts(self, ndim: int) -> Partition | None:
        return self.partition if ndim == self.ndim else None

    def local_shape(self, shape: Shape, coord: int) -> Shape:
        """Shape after this step."""
        partition = self._cuts(len(shape))
        return shape if partition is None else partition.local_shape(shape, self.size, coord)

    def region(self, shape: Shape, before: Region | None, coord: int) -> Region | None:
        """What a coord holds after this step, in logical indices; `before`: None for the whole tensor."""
        partition = self._cuts(len(shape) if before is None else len(before.local_shape))
        if partition is None:
            return before
        if before is None:
            return partition.region(shape, self.size, coord)
        return partition.within(before, self.size, coord)

    def split(self, x: Tensor, coord: int) -> Tensor:
        """The local tensor of a coord."""
        if self.pending is not None:
            return self.pending.embed(x, self.size, coord)
        partition = self._cuts(x.dim())
        return x if partition is None else partition.split(x, self.size, coord)

    def join(self, parts: Sequence[Tensor], shape: Shape) -> Tensor:
        """The tensor of this shape from those of all coords (of one coord for Replicate)."""
        if self.pending is not None:
            return self.pending.combine(parts)
        partition = self._cuts(len(shape))
        return parts[0] if partition is None else partition.join(parts, shape)


def applied_placements(
    placements: Sequence[Placement], sizes: Sequence[int], order: Sequence[int], ndim: int
) -> tuple[Applied, ...]:
    """One step per axis, in order of application.

    After a placement that flattened several dims into one, a later placement of any of them acts on the flat
    dim.
    """
    now = {dim: dim for dim in range(ndim)}
    steps = []
    for axis in order:
        placement, partition = placements[axis], None
        if isinstance(placement, Partition):
            placement = partition = placement.on_dims(now)
            group = partition.flat_group()
            now = {dim: group[-1] if at in group else at for dim, at in now.items()}
        pending = placement if isinstance(placement, Pending) else None
        steps.append(Applied(axis, sizes[axis], placement, partition, pending, ndim))
    return tuple(steps)
