"""One cut dim of a DTensor: what every rank holds along it, and a small gather along it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import torch

from shardwright.index.region import Box, Region, joined
from shardwright.index.runs import intervals
from shardwright.layout.applied import cut_form, shapes_seen
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.placement.shard import Shard
from shardwright.remember import remembered
from shardwright.rules.algorithms.algorithm import cutting_axes
from shardwright.rules.decision import LabelSize
from shardwright.rules.held_label import Held
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_in_algorithm
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import wrap


@dataclass(frozen=True)
class CutDim:
    """A dim and the mesh axes that cut it, or that hold it in another order alone (an axis of one coord).

    Args:
        dim: counted from the front.
        axes: positions of the axes that cut it, first applied first.
        held: what each combination of coords on these axes holds, row-major over `axes`.
    """

    dim: int
    axes: tuple[int, ...]
    held: tuple[Held, ...]

    def own(self, layout: Layout, coords: tuple[int, ...]) -> int:
        """Which combination these coords are."""
        index = 0
        for axis in self.axes:
            index = index * layout.sizes[axis] + coords[axis]
        return index


@remembered(1024)
def find_cut(layout: Layout, dim: int) -> CutDim | None:
    """Who holds what along a dim; None where no axis cuts it, or one does so as no label can tell."""
    dim = dim % max(1, len(layout.shape))
    cutting, ordering = cutting_axes(layout, (dim,)), ordering_axes(layout, dim)
    if not cutting or ordering is None:
        return None
    axes = tuple(axis for axis in layout.order if axis in cutting or axis in ordering)
    cuts = []
    for axis in axes:
        form = cut_form(layout, axis)
        if form is None:
            return None
        cuts.append((axis, layout.sizes[axis], form[1]))
    label = LabelSize(layout.shape[dim], tuple(cuts))
    held = []
    for combination in product(*(range(layout.sizes[axis]) for axis in axes)):
        coords = [0] * len(layout.sizes)
        for axis, coord in zip(axes, combination, strict=True):
            coords[axis] = coord
        held.append(label.held_at(coords))
    return CutDim(dim, axes, tuple(held))


@remembered(1024)
def ordering_axes(layout: Layout, dim: int) -> tuple[int, ...] | None:
    """The axes of one coord that hold a dim in another order than its own; None: one does so over several.

    One coord holds every element, but the laws leave to a partition in which order.
    """
    found = []
    for axis in range(len(layout.sizes)):
        if not reorders(layout, axis):
            continue
        form = cut_form(layout, axis)
        if form is None:
            return None
        if form[0] == dim:
            found.append(axis)
    return tuple(found)


def reorders(layout: Layout, axis: int) -> bool:
    """Whether an axis is cut over one coord, which holds elements in another order, or in other dims."""
    if layout.sizes[axis] > 1 or not layout.placements[axis].is_partition:
        return False
    at, step = next((at, step) for at, step in enumerate(layout.applied) if axis in step.axes)
    if step.size > 1:  # of the axes that cut together, the others have more coords: these are asked
        return False
    shapes = shapes_seen(layout.applied, layout.shape)[at]
    regions = [(shape, step.region(shape, None, 0)) for shape in shapes]
    return any(not _as_it_is(shape, region) for shape, region in regions if region is not None)


def _as_it_is(shape: tuple[int, ...], region: Region) -> bool:
    """Whether a region of all elements is the tensor: its shape, and its order."""
    if region.runs is not None:
        return all(len(tuple(intervals(runs))) <= 1 for runs in region.runs)
    boxes: list[Box] = joined(list(region.boxes))
    return len(boxes) <= 1 and region.local_shape == shape


def gather_along(x: DTensor, cut: CutDim, local: torch.Tensor, why: str) -> torch.Tensor:
    """Every combination's `local`, one after the other along the dim; all have the same length there.

    Raises: ImplicitRedistributionError: inside `explicit()`.
    Cost: an all-gather of `local` over the axes that cut the dim.
    """
    layout = x._spec.layout
    shape = list(layout.shape)
    shape[cut.dim] = local.shape[cut.dim] * len(cut.held)
    placements = [Shard(cut.dim) if axis in cut.axes else p for axis, p in enumerate(layout.placements)]
    source = Layout(layout.mesh_shape, placements, shape, dtype=local.dtype, order=layout.order_names)
    whole = [Replicate() if axis in cut.axes else p for axis, p in enumerate(layout.placements)]
    target = source.with_placements(whole, order=layout.order_names)
    made = wrap(local.contiguous(), spec_of(source, x.device_mesh))
    return move_in_algorithm(why, made, target, "what an algorithm made of each part is gathered")


def like_cut(x: DTensor, local: torch.Tensor) -> DTensor:
    """A new DTensor of x's shape and placements, row-major, maybe of another dtype."""
    layout = x._spec.layout.with_shape(x._spec.layout.shape, dtype=local.dtype)
    return wrap(local, spec_of(layout, x.device_mesh, x._spec.use))


def whole_along(x: DTensor, cut: CutDim, local: torch.Tensor, length: int) -> DTensor:
    """A DTensor of x's placements, but whole and of this length along the dim."""
    layout = x._spec.layout
    shape = (*layout.shape[: cut.dim], length, *layout.shape[cut.dim + 1 :])
    whole = [Replicate() if axis in cut.axes else p for axis, p in enumerate(layout.placements)]
    made = Layout(layout.mesh_shape, whole, shape, dtype=local.dtype, order=layout.order_names)
    return wrap(local, spec_of(made, x.device_mesh, x._spec.use))


def gather_bytes(layout: Layout, dim: int, each: int, itemsize: int) -> int | None:
    """Bytes that a rank sends to gather `each` entries per row from every combination of coords."""
    cut = find_cut(layout, dim)
    if cut is None or 0 in layout.shape:
        return None
    rows = prod(size for d, size in enumerate(layout.shape) if d != cut.dim)
    for axis, placement in enumerate(layout.placements):
        if placement.is_partition and axis not in cut.axes:
            rows = -(-rows // layout.sizes[axis])
    return (len(cut.held) - 1) * each * rows * itemsize


def is_outside(x: DTensor) -> bool:
    """Whether this rank is no part of the tensor's mesh."""
    return x._spec.coords is None
