"""The placements of a layout in the order in which they act, each on what the earlier ones left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from torch import Tensor

from shardwright.index.region import Region, Shape
from shardwright.layout.mesh_shape import Coords
from shardwright.placement.base import Partition, Pending, Placement
from shardwright.placement.made_by_views.joint import Joint, joint_groups
from shardwright.placement.made_by_views.moved import Moved
from shardwright.placement.one_dim_form import is_shipped, one_dim_form, placed_on


@dataclass(frozen=True, slots=True)
class Applied:
    """One placement on one axis, its dims counted in the tensor that the earlier axes left.

    Axes that cut together are one step: `coord` is then the row-major index of their coords.
    A coord of an `Owner` that holds nothing of a 0-d tensor has shape (0,): later placements leave it alone.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int
    placement: Placement
    partition: Partition | None  # the placement, if it decides which elements a coord holds
    pending: Pending | None  # the placement, if it reduces
    ndim: int

    def coord(self, coords: Coords) -> int:
        """The coord on this step's axes."""
        if len(self.axes) == 1:
            return coords[self.axes[0]]
        coord = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            coord = coord * size + coords[axis]
        return coord

    def at(self, coords: Coords, coord: int) -> Coords:
        """These coords, with this one on the step's axes."""
        found = list(coords)
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            coord, found[axis] = divmod(coord, size)
        return tuple(found)

    def even(self, shape: Shape) -> bool:
        """Whether all coords are left with the same shape."""
        partition = self._cuts(len(shape))
        return partition is None or partition.even(shape, self.size)

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
    """One step per axis, or group of axes that cut together, in order of application.

    After a placement that flattened several dims into one, a later placement of any of them acts on the flat
    dim. A group acts where the first of its axes does.
    """
    now = {dim: dim for dim in range(ndim)}
    steps = []
    for axes, given in _steps(placements, order):
        placement, partition = given, None
        if isinstance(placement, Partition):
            placement = partition = placement.on_dims(now)
            group = partition.flat_group()
            now = {dim: group[-1] if at in group else at for dim, at in now.items()}
        pending = placement if isinstance(placement, Pending) else None
        own = tuple([sizes[axis] for axis in axes])
        steps.append(Applied(axes, own, prod(own), placement, partition, pending, ndim))
    return tuple(steps)


def _steps(placements: Sequence[Placement], order: Sequence[int]) -> list[tuple[tuple[int, ...], Placement]]:
    if Joint not in map(type, placements):
        return [((axis,), placements[axis]) for axis in order]
    groups = {axis: group for group in joint_groups(placements) for axis in group}
    steps: list[tuple[tuple[int, ...], Placement]] = []
    done: set[int] = set()
    for axis in order:
        if axis in done:
            continue
        placement, axes = placements[axis], groups.get(axis, (axis,))
        if axis in groups and isinstance(placement, Joint):
            placement = placement.partition
        steps.append((axes, placement))
        done.update(axes)
    return steps


def complete(placements: tuple[Placement, ...], shape: Shape) -> tuple[Placement, ...]:
    """The placements; an axis of a group whose other axes are gone is what it means alone."""
    if Joint not in map(type, placements):
        return placements
    grouped = {axis for group in joint_groups(placements) for axis in group}
    return tuple(
        p.alone(shape) if isinstance(p, Joint) and axis not in grouped else p
        for axis, p in enumerate(placements)
    )


def shapes_seen(steps: Sequence[Applied], shape: Shape) -> list[set[Shape]]:
    """Per step the shapes that the earlier ones leave, on any coord."""
    seen = [{shape}]
    for step in steps:
        seen.append({step.local_shape(left, coord) for left in seen[-1] for coord in range(step.size)})
    return seen


def by_own_names(
    placements: tuple[Placement, ...], sizes: Sequence[int], order: Sequence[int], shape: Shape
) -> tuple[Placement, ...]:
    """The placements; a cut that rules moved along a dim is called by its own class where that says the same.

    It must say so of every shape that it is given here.
    """
    if Moved not in map(type, placements):
        return placements
    steps = applied_placements(placements, sizes, order, len(shape))
    found = list(placements)
    for step, shapes in zip(steps, shapes_seen(steps, shape), strict=False):
        placement = step.placement
        if isinstance(placement, Moved) and placements[step.axes[0]] == placement:
            names = {_own_name(placement, left, step.size) for left in shapes}
            found[step.axes[0]] = names.pop() if len(names) == 1 else placement
    return tuple(found)


def _own_name(moved: Moved, shape: Shape, n: int) -> Placement:
    line = moved.source if moved.ndim == 1 else replace(moved, dim=0)
    return placed_on(line, moved.dim, shape, n) or moved


class _Laid(Protocol):
    """What `cut_form` asks of a layout, whose class stands above this module."""

    @property
    def placements(self) -> tuple[Placement, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def applied(self) -> tuple[Applied, ...]: ...


def cut_form(layout: _Laid, axis: int) -> tuple[int, Partition] | None:
    """The dim that an axis cuts and its cut as a 1-d partition; None if it is no cut of one dim.

    A class that is not the library's own must cut alike every shape that earlier axes leave it.
    """
    placement, n = layout.placements[axis], layout.sizes[axis]
    if not isinstance(placement, Partition):
        return None
    if is_shipped(placement):
        return one_dim_form(placement, layout.shape, n)
    place = next(at for at, step in enumerate(layout.applied) if axis in step.axes)
    forms = {one_dim_form(placement, shape, n) for shape in shapes_seen(layout.applied, layout.shape)[place]}
    return forms.pop() if len(forms) == 1 else None
