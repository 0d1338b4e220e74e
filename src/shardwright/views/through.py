"""The layout of what a view sees: each cut of the source becomes a cut of the target, element by element.

Axes that cut dims which the view mixes are treated as one cut over all their coords, and taken apart again
where each of them can say alone what it holds. Everything is decided once, for all coords.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from shardwright.index.region import Shape
from shardwright.index.view import View
from shardwright.layout.applied import Applied, cut_form
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Placement
from shardwright.placement.made_by_views.flat import Flat
from shardwright.placement.made_by_views.imaged import Imaged
from shardwright.placement.made_by_views.joint import Joint
from shardwright.placement.made_by_views.nested import Nested
from shardwright.placement.made_by_views.sliced import Sliced
from shardwright.placement.made_by_views.spread import Spread
from shardwright.placement.one_dim_form import along, is_shipped, one_dim_form
from shardwright.placement.owner import Owner
from shardwright.remember import remembered
from shardwright.views.names import coord_of, distributed, on_dims, owners, simplest


@dataclass(frozen=True)
class Part:
    """Axes whose cuts a view mixes.

    steps: what cuts, in order of application. source: the dims that they cut, and those that a reshape mixes
    with them. target: the dims that come of them.
    """

    steps: tuple[Applied, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes, in order of application."""
        return tuple([axis for step in self.steps for axis in step.axes])

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Their sizes."""
        return tuple([size for step in self.steps for size in step.sizes])

    def together(self, shape: Shape) -> Partition:
        """The cut of the dims `source` by all axes together, these dims counted from 0."""
        where = {dim: at for at, dim in enumerate(self.source)}
        parts = tuple((_moved(step, where, shape), step.size) for step in self.steps)
        return parts[0][0] if len(parts) == 1 else Nested(parts)


@remembered(8192)
def through(layout: Layout, view: View, dtype: torch.dtype, stride: Shape | None) -> Layout:
    """The layout of what `view` sees of a tensor of this layout. No communication.

    Raises: PlacementError: the view mixes more elements than can be listed.
    """
    if view.nothing_changes:
        return layout.with_shape(view.target, stride, dtype=dtype)
    placements = list(layout.placements)
    order = list(layout.order)
    for part in parts_of(layout, view):
        places = sorted(order.index(axis) for axis in part.axes)
        for place, axis, placement in zip(places, part.axes, _seen(part, view), strict=True):
            order[place] = axis
            placements[axis] = placement
    names = [layout.axes[axis] for axis in order]
    return Layout(layout.mesh_shape, placements, view.target, dtype=dtype, stride=stride, order=names)


@remembered(8192)
def parts_of(layout: Layout, view: View) -> tuple[Part, ...]:
    """The cuts of a layout, those together that the view mixes."""
    parts: list[Part] = []
    for step in layout.partitions:
        if cast_partition(step).undivided:
            continue  # an owner: it has whatever the view sees
        step = _told(layout, step)  # noqa: PLW2901 - the same cut
        source, target = _reach(step, view)
        touching = [p for p in parts if set(p.source) & source or set(p.target) & target]
        parts = [p for p in parts if p not in touching]
        steps = [s for p in touching for s in p.steps]
        source = source.union(*(p.source for p in touching))
        target = target.union(*(p.target for p in touching))
        parts.append(Part((*steps, step), tuple(sorted(source)), tuple(sorted(target))))
    return tuple([_in_order(part, layout) for part in parts])


def _in_order(part: Part, layout: Layout) -> Part:
    place = {step.axes: at for at, step in enumerate(layout.partitions)}
    return Part(tuple(sorted(part.steps, key=lambda s: place[s.axes])), part.source, part.target)


def _reach(step: Applied, view: View) -> tuple[set[int], set[int]]:
    """The source dims that a step cuts, with what a reshape mixes, and the target dims that show them."""
    cut = set(_cut(step, view.source))
    if view.rows is None:
        blocks = [block for block in view.blocks() if cut & set(block[0])]
        return {d for own, _ in blocks for d in own}, {e for _, other in blocks for e in other}
    return cut, {e for dim in cut for e in view.targets_of(dim)}


def _told(layout: Layout, step: Applied) -> Applied:
    """A step that tells its dims: a class that only its regions are believed of, as the cut that they are."""
    if is_shipped(cast_partition(step)) or len(step.axes) > 1 or _flattened_before(layout, step):
        return step
    form = cut_form(layout, step.axes[0])
    known = None if form is None else along(form[1], form[0])
    return step if known is None else replace(step, placement=known, partition=known)


def _flattened_before(layout: Layout, step: Applied) -> bool:
    """Whether an earlier step made one dim of several: then the dims that a step sees have other numbers."""
    earlier = layout.partitions[: layout.partitions.index(step)]
    return any(len(cast_partition(before).flat_group()) > 1 for before in earlier)


def _cut(step: Applied, shape: Shape) -> tuple[int, ...]:
    """The dims that a step cuts; all, where its dims cannot be counted in fewer.

    A class that is not the library's own has a meaning for the very shape that it was given: where it cuts
    none of its dims, one coord may still hold the elements in an order of its own.
    """
    partition = cast_partition(step)
    return partition.cut_dims(shape, step.size) if is_shipped(partition) else tuple(range(len(shape)))


def cast_partition(step: Applied) -> Partition:
    """The partition of a step that has one."""
    if step.partition is None:
        raise TypeError("a step of `Layout.partitions` cuts")
    return step.partition


def _moved(step: Applied, where: dict[int, int], shape: Shape) -> Partition:
    partition = cast_partition(step)
    return partition if len(where) == len(shape) else partition.on_dims(where)


# -------------------------------------------------------------------------------------------- one part


def _seen(part: Part, view: View) -> tuple[Placement, ...]:
    """One placement per axis of the part."""
    n, sizes = prod(part.sizes), tuple(view.target[e] for e in part.target)
    if 0 in view.target:
        return tuple(Owner(0) for _ in part.axes)
    kept = _kept(part, view)
    if kept is not None:
        return kept
    if not part.target:
        return owners(_holder(part, view, n), part.sizes)
    cut = _formula(part, view, n) or imaged(part, view)
    return distributed(simplest(cut, prod(sizes), n), sizes, part.target, part.sizes)


def _kept(part: Part, view: View) -> tuple[Placement, ...] | None:
    """The placements as they are, their dims renumbered, if the view keeps every dim that they cut."""
    known = kept_dims(part, view)
    if known is None:
        return None
    placements: list[Placement] = []
    for step in part.steps:
        moved = _renumbered(cast_partition(step), known, view.source, step.size)
        if moved is None:
            return None
        one = len(step.axes) == 1
        placements += [moved] if one else [Joint(moved, step.sizes, i) for i in range(len(step.axes))]
    order = [axis for step in part.steps for axis in step.axes]
    return tuple(placements[order.index(axis)] for axis in part.axes)


@remembered(8192)
def kept_dims(part: Part, view: View) -> Mapping[int, int] | None:
    """Each dim that a part cuts and the target dim that it is, if the view keeps them all as they are."""
    known: dict[int, int] = {}
    for dim in part.source:
        target = view.keeps(dim)
        if target is None:
            return None
        known[dim] = target
    if any(_renumbered(cast_partition(step), known, view.source, step.size) is None for step in part.steps):
        return None
    return known


def _renumbered(partition: Partition, known: Mapping[int, int], shape: Shape, n: int) -> Partition | None:
    """The same cut of the dims that its dims have become; None where they cannot be renumbered."""
    form = told_form(partition, shape, n)
    if form is not None:
        return along(form[1], known[form[0]])
    group = flat_group(partition)
    source = flat_source(partition)
    if source is None or isinstance(partition, Nested):
        return None
    dims = tuple(known[dim] for dim in group)
    return Flat(dims, source) if source.undivided and len(dims) > 1 else on_dims(source, dims)


def flat_source(partition: Partition) -> Partition | None:
    """How a partition that flattens several dims cuts the flat one."""
    group = flat_group(partition)
    return partition.on_dims(dict.fromkeys(group, 0)).on_dim(0) if group else None


def told_form(partition: Partition, shape: Shape, n: int) -> tuple[int, Partition] | None:
    """`one_dim_form` of what tells its dims; what does not was already asked for the shapes that it sees."""
    return one_dim_form(partition, shape, n) if is_shipped(partition) else None


def flat_group(partition: Partition) -> tuple[int, ...]:
    """The dims that a partition flattens into one; what a class of others says of itself is not relied on."""
    return partition.flat_group() if is_shipped(partition) else ()


def _holder(part: Part, view: View, n: int) -> int:
    """The coord that has the one element of the part's dims that the view sees."""
    shape = tuple(view.source[dim] for dim in part.source)
    cut = part.together(view.source)
    form = told_form(cut, shape, n)
    if form is not None:
        index = view.base[part.source[form[0]]] if view.base else 0
        return coord_of(form[1], shape[form[0]], n, index)
    seen = imaged(part, view)
    return next(coord for coord in range(n) if seen.local_length(1, n, coord))


def _formula(part: Part, view: View, n: int) -> Partition | None:
    """The cut of the flattened target dims, where a formula says it."""
    shape = tuple(view.source[dim] for dim in part.source)
    cut = part.together(view.source)
    form = told_form(cut, shape, n)
    if view.rows is None:
        return _merged(cut, form, shape)
    if form is None:
        return None
    dim, flat = part.source[form[0]], form[1]
    targets = view.targets_of(dim)
    if len(targets) != 1 or part.target != targets:
        return None
    step, length = view.rows[dim][targets[0]], view.target[targets[0]]
    if step < 1:
        return None
    return Sliced(0, flat, view.source[dim], view.base[dim], step, length)


def _merged(cut: Partition, form: tuple[int, Partition] | None, shape: Shape) -> Partition | None:
    """The cut of the flattening of all dims of this shape."""
    if form is not None:
        dim, flat = form
        return Spread(0, flat, prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]))
    group = flat_group(cut)
    if not group or isinstance(cut, Nested) or group != tuple(range(group[0], group[-1] + 1)):
        return None
    whole = flat_source(cut)
    if whole is None:
        return None
    outer, inner = prod(shape[: group[0]]), prod(shape[group[-1] + 1 :])
    return Spread(0, whole, outer, prod(shape[d] for d in group), inner)


def imaged(part: Part, view: View) -> Imaged:
    """The cut of the flattened target dims, element by element."""
    shape = tuple(view.source[dim] for dim in part.source)
    target = tuple(view.target[e] for e in part.target)
    cut = part.together(view.source)
    if view.rows is None:
        return Imaged(0, cut, target, shape)
    base = tuple(view.base[dim] for dim in part.source)
    rows = tuple(tuple(view.rows[dim][e] for e in part.target) for dim in part.source)
    return Imaged(0, cut, target, shape, base, rows)
