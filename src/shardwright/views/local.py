"""What a view is of one rank's local tensor: an alias, or a copy that knows where its elements came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shardwright.compat import CANNOT_VIEW, FakeTensor, get_proxy_mode, neg_view
from shardwright.compat.graph_order import nothing_of
from shardwright.index.region import Shape
from shardwright.index.runs import intervals
from shardwright.index.view import View
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import Coords
from shardwright.placement.base import Partition
from shardwright.placement.made_by_views.imaged import Indices
from shardwright.placement.one_dim import held, picked_positions
from shardwright.views.through import Part, flat_group, imaged, kept_dims, parts_of, told_form

Walk = range | Indices


@dataclass(frozen=True, slots=True, eq=False)
class LocalView:
    """The local result of a view on one rank.

    shape: its shape. steps: per local source dim, the first index and the step per local result dim; then the
    result is a strided view. Without steps, `index` lists the places in the local source, row-major, of the
    elements of the result; without both, the elements are all of the local source in its order.
    overlaps: an element of the source may be seen twice.
    """

    shape: Shape
    steps: tuple[tuple[int, Shape], ...] | None
    index: Indices | None
    overlaps: bool

    @property
    def nothing(self) -> bool:
        """Whether it sees no element."""
        return prod(self.shape) == 0

    def without_last(self) -> LocalView:
        """The same without the last dim of the result, at its index 0."""
        shape = self.shape[:-1]
        steps = None if self.steps is None else tuple((first, row[:-1]) for first, row in self.steps)
        index = None if self.index is None else self.index.reshape(self.shape)[..., 0].reshape(-1).copy()
        return LocalView(shape, steps, index, self.overlaps)

    def take(self, local: Tensor) -> tuple[Tensor, bool]:
        """The local result, and whether it is a copy."""
        if self.nothing:
            return noted_as(local, nothing_of(local, self.shape)), False
        if self.steps is not None:
            alias = self._strided(local)
            return self._listed(local.shape).take(local) if alias is None else (alias, False)
        if self.index is not None:
            places = _beside(self.index, local)
            return noted_as(local, memory_of(local).reshape(-1)[places].view(self.shape)), True
        try:
            return local.view(self.shape), False
        except CANNOT_VIEW:  # the local strides do not merge, although the logical ones do
            return noted_as(local, memory_of(local).reshape(self.shape)), True

    def put(self, local: Tensor, values: Tensor) -> None:
        """Write the elements of the result to where they are in a local source, in place."""
        if self.nothing:
            nothing_of(local, (0,)).copy_(nothing_of(values, (0,)))  # a graph has the values as read
        elif self.steps is not None:
            alias = self._strided(local)
            self._listed(local.shape).put(local, values) if alias is None else alias.copy_(values)
        elif self.index is not None:
            flat = carried_out(local).reshape(-1)
            shares = flat.untyped_storage()._cdata == local.untyped_storage()._cdata
            flat = flat.clone() if shares else flat
            flat[_beside(self.index, local)] = carried_out(values).reshape(-1)
            local.copy_(flat.view(local.shape))
        else:
            local.copy_(values.reshape(local.shape))

    def embed(self, values: Tensor, shape: Shape) -> Tensor:
        """A new local source that is zero but for the elements of the result, those seen twice added up."""
        out = values.new_zeros(shape)
        if not self.overlaps or self.nothing:
            self.put(out, values)
            return out
        places = torch.arange(out.numel(), device=out.device).view(shape)
        index = self.take(places)[0].reshape(-1)
        return out.view(-1).index_add_(0, index, values.reshape(-1)).view(shape)

    def _strided(self, local: Tensor) -> Tensor | None:
        """The alias. None: in a graph, which would hold where the local source begins in its storage."""
        if type(local) is not Tensor:  # as in graphs
            return self._sliced(local)
        offset = local.storage_offset()
        strides = [0] * len(self.shape)
        for (base, row), stride in zip(self.steps or (), local.stride(), strict=True):
            offset += base * stride
            for dim, step in enumerate(row):
                strides[dim] += step * stride
        return local.as_strided(self.shape, strides, offset)

    def _listed(self, source: Shape) -> LocalView:
        """The same by the places of its elements in a local source of this shape."""
        places, stride = np.zeros(self.shape, dtype=np.int64), 1
        for (first, row), size in zip(reversed(self.steps or ()), reversed(source), strict=True):
            places += first * stride
            for dim, step in enumerate(row):
                along = [1] * len(self.shape)
                along[dim] = self.shape[dim]
                places += (np.arange(self.shape[dim]) * (step * stride)).reshape(along)
            stride *= size
        return LocalView(self.shape, None, places.reshape(-1), self.overlaps)

    def _sliced(self, local: Tensor) -> Tensor | None:
        """The same by slices and diagonals, if it is that.

        In a graph torch writes into no strides of a view, and no bools into what is expanded.
        """
        walked = []  # by axis of the local source the dim of the result, that of no dim the last
        for axis, (first, row) in enumerate(self.steps or ()):
            dims = [dim for dim, step in enumerate(row) if step and self.shape[dim] > 1]
            if len(dims) > 1:
                return None
            step, size = (row[dims[0]], self.shape[dims[0]]) if dims else (1, 1)
            local = torch.ops.aten.slice(local, axis, first, first + step * (size - 1) + 1, step)
            walked.append(dims[0] if dims else len(self.shape))
        for dim in range(len(self.shape)):
            while walked.count(dim) > 1:
                one, other = [axis for axis, its in enumerate(walked) if its == dim][:2]
                local = local.diagonal(0, one, other)
                walked = [its for axis, its in enumerate(walked) if axis not in (one, other)] + [dim]
        local = local.permute(sorted(range(len(walked)), key=walked.__getitem__))
        sliced = local.view([size if dim in walked else 1 for dim, size in enumerate(self.shape)])
        return sliced if sliced.shape == self.shape else sliced.expand(self.shape)


def _beside(index: Indices, local: Tensor) -> Tensor:
    """Places as indices of a local tensor; without data where Dynamo asks what a view looks like."""
    places = torch.from_numpy(index).to(local.device)
    if isinstance(local, FakeTensor) and get_proxy_mode() is None:
        asked: Any = local
        return cast("Tensor", asked.fake_mode.from_tensor(places))
    return places


def memory_of(local: Tensor) -> Tensor:
    """The local tensor as its memory is, without a conjugation or a sign that is only noted: a view."""
    seen = local.conj() if local.is_conj() else local
    return neg_view(seen) if seen.is_neg() else seen


def noted_as(local: Tensor, memory: Tensor) -> Tensor:
    """Note of this memory what is noted of the local tensor.

    Whether a rank had to copy is its own business; what torch sees noted decides which calls it makes.
    """
    seen = memory.conj() if local.is_conj() != memory.is_conj() else memory
    return neg_view(seen) if local.is_neg() != seen.is_neg() else seen


def carried_out(local: Tensor) -> Tensor:
    """The local tensor with a conjugation or a sign that is only noted carried out.

    Below dispatch kernels that copy by an index see memory alone.
    """
    return local.resolve_conj().resolve_neg()


@dataclass(frozen=True, slots=True, eq=False)
class ChainedView:
    """Views one after another of one local tensor, as one."""

    views: tuple[LocalView, ...]

    @property
    def nothing(self) -> bool:
        """Whether it sees no element."""
        return self.views[-1].nothing

    @property
    def overlaps(self) -> bool:
        """Whether an element of the source may be seen twice."""
        return any(view.overlaps for view in self.views)

    def take(self, local: Tensor) -> tuple[Tensor, bool]:
        """The local result, and whether it is a copy."""
        copied = False
        for view in self.views:
            local, anew = view.take(local)
            copied = copied or anew
        return local, copied

    def put(self, local: Tensor, values: Tensor) -> None:
        """Write the elements of the result to where they are in a local source, in place."""
        seen, copied = [local], []
        for view in self.views[:-1]:
            taken, anew = view.take(seen[-1])
            seen.append(taken)
            copied.append(anew)
        self.views[-1].put(seen[-1], values)
        for at in reversed(range(len(copied))):
            if copied[at]:  # else what was written is the source's memory
                self.views[at].put(seen[at], seen[at + 1])


def local_view(source: Layout, target: Layout, view: View, coords: Coords) -> LocalView:
    """What `view` is of the local tensor at these coords; `target` is `through(source, view)`."""
    shape = target.local_shape(coords)
    overlaps = view.rows is not None and _overlaps(view)
    if not prod(shape):
        return LocalView(shape, None, None, overlaps)
    parts = () if view.nothing_changes else parts_of(source, view)
    if view.rows is None:
        return LocalView(shape, None, _reordered(source, shape, view, parts, coords), overlaps)
    walks = _Walks(source, target, view, parts, coords)
    steps = walks.steps()
    return LocalView(shape, steps, None if steps is not None else walks.index(), overlaps)


def _overlaps(view: View) -> bool:
    """Whether an element of the source may be seen twice: a dim repeats it, or windows overlap."""
    rows = view.rows or ()
    for target, size in enumerate(view.target):
        if size > 1 and not any(row[target] for row in rows):
            return True
    return any(_meets(row, view.target) for row in rows if sum(map(bool, row)) > 1)


def _meets(row: Shape, sizes: Shape) -> bool:
    """Whether two different indices have the same sum."""
    reach = 0
    lines = zip(row, sizes, strict=True)
    for step, size in sorted((step, size) for step, size in lines if step and size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _coord(part: Part, coords: Coords) -> int:
    coord = 0
    for axis, size in zip(part.axes, part.sizes, strict=True):
        coord = coord * size + coords[axis]
    return coord


# ------------------------------------------------------------------------------------------- reshapes


def _reordered(
    source: Layout, target: Shape, view: View, parts: Sequence[Part], coords: Coords
) -> Indices | None:
    """Places in the local source of the local result's elements; None where they are in the same order.

    Each part, and each block of dims that none cuts, becomes one dim; its elements are put in order, and it
    is taken apart into the result's dims. Dims of a part need not be neighbours.
    """
    orders = [_order_of(part, view, coords) for part in parts]
    neighbours = all(_adjacent(part.source) and _adjacent(part.target) for part in parts)
    if neighbours and all(order is None for order in orders):
        return None
    local = source.local_shape(coords)
    cut = {dim for part in parts for dim in part.source}
    units = [(part.source, part.target, order) for part, order in zip(parts, orders, strict=True)]
    units += [(own, other, None) for own, other in view.blocks() if not cut & set(own)]
    places: Indices = np.arange(prod(local)).reshape(local).transpose([d for own, _, _ in units for d in own])
    places = places.reshape([prod(local[dim] for dim in own) for own, _, _ in units])
    for at, (_, _, order) in enumerate(units):
        if order is not None:
            places = np.take(places, order, axis=at)
    dims = [dim for _, other, _ in units for dim in other]
    places = places.reshape([target[dim] for dim in dims]).transpose(np.argsort(dims))
    found = np.ascontiguousarray(places.reshape(-1))
    return None if bool((found == np.arange(len(found))).all()) else found


def _adjacent(dims: tuple[int, ...]) -> bool:
    return not dims or dims == tuple(range(dims[0], dims[-1] + 1))


def _order_of(part: Part, view: View, coords: Coords) -> Indices | None:
    """Where the elements of a block, in the local result's order, are in the local source's; None: there."""
    shape = tuple(view.source[dim] for dim in part.source)
    cut = part.together(view.source)
    n = prod(part.sizes)
    if told_form(cut, shape, n) is not None or kept_dims(part, view) is not None:
        return None
    group = flat_group(cut)
    if len(part.steps) == 1 and group and _adjacent(group):
        return None
    found = imaged(part, view).positions(n, _coord(part, coords))
    return None if bool((found == np.arange(len(found))).all()) else found


# ------------------------------------------------------------------------------- slices, diagonals, windows


class _Walks:
    """Per target dim its logical indices on this rank, per cut source dim the local places, as walks.

    A walk is a range, or an array over the local target dims of its part.
    """

    def __init__(
        self, source: Layout, target: Layout, view: View, parts: Sequence[Part], coords: Coords
    ) -> None:
        self.view = view
        self.local_source = source.local_shape(coords)
        self.shape = target.local_shape(coords)
        self.logical: dict[int, Walk] = {}
        self.groups: dict[int, tuple[int, ...]] = {}
        self.places: dict[int, tuple[tuple[int, ...], Walk]] = {}
        for part in parts:
            self._enter(part, coords)

    def _enter(self, part: Part, coords: Coords) -> None:
        view, n, coord = self.view, prod(part.sizes), _coord(part, coords)
        kept = kept_dims(part, view)
        if kept is not None:
            for dim, target in kept.items():
                self.places[dim] = ((target,), range(self.local_source[dim]))
            return
        shape = tuple(view.source[dim] for dim in part.source)
        cut = part.together(view.source)
        form = told_form(cut, shape, n)
        if form is not None and self._along(part, part.source[form[0]], form[1], n, coord):
            return
        seen = imaged(part, view)
        places = seen.positions(n, coord)
        runs = seen.runs(prod(seen.target), n, coord)
        indices = np.concatenate([np.arange(low, low + size) for low, size in intervals(runs)])
        at = np.unravel_index(indices, seen.target) if seen.target else ()
        for e, index in zip(part.target, at, strict=True):
            self._set_logical(e, index, part.target)
        local = tuple(self.local_source[dim] for dim in part.source)
        at = np.unravel_index(places, local) if local else ()
        for dim, index in zip(part.source, at, strict=True):
            self.places[dim] = (part.target, index)

    def _along(self, part: Part, dim: int, flat: Partition, n: int, coord: int) -> bool:
        """One dim that is cut, and at most one target dim that shows it."""
        view = self.view
        targets = view.targets_of(dim)
        rows = view.rows or ()
        if len(targets) > 1 or part.target != targets:
            return False
        step = rows[dim][targets[0]] if targets else 1
        length = view.target[targets[0]] if targets else 1
        runs = held(flat, view.source[dim], n, coord)
        picked = picked_positions(runs, view.base[dim], step, length)
        self.places[dim] = (targets, _joined(picked))
        if targets:
            found, position = [], 0
            for low, size in intervals(runs):
                first = max(-(-(low - view.base[dim]) // step), 0)
                last = min(-(-(low + size - view.base[dim]) // step), length)
                if last > first:
                    found.append(range(first, last))
                position += size
            self._set_logical(targets[0], _joined(found), targets)
        return True

    def _set_logical(self, target: int, walk: Walk, group: tuple[int, ...]) -> None:
        self.logical[target] = walk
        self.groups[target] = group

    def _local(self, group: tuple[int, ...]) -> Shape:
        return tuple(self.shape[e] for e in group)

    def steps(self) -> tuple[tuple[int, Shape], ...] | None:
        """Per local source dim the first index and the steps per result dim; None: not evenly spaced."""
        found = []
        for dim in range(len(self.local_source)):
            line = self._line(dim)
            if line is None or min(line[1], default=0) < 0:  # torch has no negative strides
                return None
            found.append(line)
        return tuple(found)

    def _line(self, dim: int) -> tuple[int, Shape] | None:
        row = [0] * len(self.shape)
        if dim in self.places:
            group, walk = self.places[dim]
            line = _evenly(walk, self._local(group))
            if line is None:
                return None
            for e, step in zip(group, line[1], strict=True):
                row[e] = step
            return line[0], tuple(row)
        base = self.view.base[dim]
        for e, step in enumerate((self.view.rows or ())[dim]):
            if not step:
                continue
            if e not in self.logical:
                row[e] += step
                continue
            group = self.groups[e]
            line = _evenly(self.logical[e], self._local(group))
            if line is None:
                return None
            base += step * line[0]
            for target, own in zip(group, line[1], strict=True):
                row[target] += step * own
        return base, tuple(row)

    def index(self) -> Indices:
        """Places in the local source, row-major, of the elements of the local result."""
        total = np.zeros((1,) * len(self.shape), dtype=np.int64)
        stride = 1
        for dim in reversed(range(len(self.local_source))):
            total = total + self._index(dim) * stride
            stride *= self.local_source[dim]
        return np.array(np.broadcast_to(total, self.shape)).reshape(-1)

    def _index(self, dim: int) -> Indices:
        if dim in self.places:
            return self._spread(*self.places[dim])
        found: Indices = np.full((1,) * len(self.shape), self.view.base[dim])
        for e, step in enumerate((self.view.rows or ())[dim]):
            if step:
                walk = self.logical.get(e, range(self.shape[e]))
                found = found + step * self._spread(self.groups.get(e, (e,)), walk)
        return found

    def _spread(self, group: tuple[int, ...], walk: Walk) -> Indices:
        """A walk over the local target dims of its group, as an array that broadcasts to the result."""
        own = self._local(group)
        order = sorted(range(len(group)), key=lambda at: group[at])
        array = np.asarray(walk).reshape(own).transpose(order)
        sizes = [self.shape[e] if e in group else 1 for e in range(len(self.shape))]
        return array.reshape(sizes)


def _joined(walks: Sequence[range]) -> Walk:
    """Walks one after another; a range if they are one."""
    if len(walks) == 1:
        return walks[0]
    parts = [np.arange(w.start, w.stop, w.step) for w in walks]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _evenly(walk: Walk, shape: Shape) -> tuple[int, Shape] | None:
    """The first value and the step per dim, if values over this shape are evenly spaced; None if not."""
    if isinstance(walk, range):
        if not shape:
            return walk[0], ()
        steps = [0] * len(shape)
        steps[next((at for at, size in enumerate(shape) if size == len(walk)), 0)] = walk.step
        return walk[0], tuple(steps)
    array = np.asarray(walk).reshape(shape)
    first = int(array.reshape(-1)[0])
    steps = []
    wanted = np.full((1,) * len(shape), first)
    for at, size in enumerate(shape):
        corner = [0] * len(shape)
        corner[at] = min(1, size - 1)
        step = int(array[tuple(corner)]) - first
        steps.append(step)
        sizes = [1] * len(shape)
        sizes[at] = size
        wanted = wanted + (np.arange(size) * step).reshape(sizes)
    return (first, tuple(steps)) if bool((array == wanted).all()) else None
