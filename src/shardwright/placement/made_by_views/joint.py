"""`Joint`: one axis of several that cut a tensor together, in a way that none of them can say alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.errors import PlacementError
from shardwright.index.region import Region, Shape
from shardwright.placement.base import Partition, Placement, check_counts, check_source
from shardwright.placement.shard import Shard


@dataclass(frozen=True, repr=False)
class Joint(Partition):
    """Axis `index` of axes of these `sizes` that cut a tensor as `partition` cuts it over all their coords.

    What one of them holds depends on the coords on the others: a slice of a dim that two axes cut. A layout
    applies the axes of a group together, the first of them outermost; without the others, one axis is the
    plain cut of the last dim that they cut.
    """

    partition: Partition
    sizes: tuple[int, ...]
    index: int

    def alone(self, shape: Shape) -> Partition:
        """What this axis means without the others of its group."""
        return Shard(self.partition.cut_dims(shape, prod(self.sizes))[-1])

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """What the axis holds alone."""
        return self.alone(shape).region(shape, n, coord)

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:
        """The local shape of the axis alone."""
        return self.alone(shape).local_shape(shape, n, coord)

    def cut_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - of the group
        """The dims that the axes cut together."""
        return self.partition.cut_dims(shape, prod(self.sizes))

    def touched_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - of the group
        """The dims that the axes touch together."""
        return self.partition.touched_dims(shape, prod(self.sizes))

    def flat_group(self) -> tuple[int, ...]:
        """The dims that the axes flatten together."""
        return self.partition.flat_group()

    def on_dims(self, dims: dict[int, int]) -> Partition:
        """The same axis of the cut with dims renumbered."""
        return replace(self, partition=self.partition.on_dims(dims))

    def resolved(self, ndim: int) -> Partition:
        """The same axis of the cut with dims counted from the front."""
        return replace(self, partition=self.partition.resolved(ndim))

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return self._called()

    def validate(self, shape: Shape, n: int) -> None:
        """The axis must have its size, and the tensor what the group cuts."""
        check_source(self.text(), self.partition)
        check_counts(self.text(), 1, **{f"the size of axis {i}": size for i, size in enumerate(self.sizes)})
        if not 0 <= self.index < len(self.sizes) or self.sizes[self.index] != n:
            raise PlacementError(f"{self.text()}: an axis of size {n} is not the one meant")
        self.partition.validate(shape, prod(self.sizes))


def joint_groups(placements: Sequence[Placement]) -> list[tuple[int, ...]]:
    """The axes of every complete group, each in the order of the group."""
    waiting: dict[tuple[Partition, tuple[int, ...]], dict[int, list[int]]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Joint):
            waiting.setdefault((placement.partition, placement.sizes), {}).setdefault(
                placement.index, []
            ).append(axis)
    groups = []
    for (_, sizes), axes in waiting.items():
        count = min((len(axes.get(i, ())) for i in range(len(sizes))), default=0)
        groups += [tuple(axes[i][k] for i in range(len(sizes))) for k in range(count)]
    return groups
