"""The placements of a layout and the order in which they apply, worked out once for all layouts alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch

from shardwright.errors import LayoutError, as_several
from shardwright.index.region import Shape
from shardwright.layout.applied import Applied, applied_placements, by_own_names, complete
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.along_dim import states_runs
from shardwright.placement.base import Partition, Pending, Placement
from shardwright.placement.first_pending import check_pending
from shardwright.placement.first_use import PLAIN, check_dims, check_partition, is_own
from shardwright.remember import remembered

Order = tuple[int, ...]


class OrderedPlacements(tuple["Placement", ...]):  # noqa: SLOT001 - a tuple cannot have slots of its own
    """One placement per axis, and the `order` of application (axis names; None: left to right).

    Usable wherever placements are; a layout that is given no order of its own takes this one.
    """

    order: tuple[str, ...] | None

    def __new__(cls, placements: Iterable[Placement], order: Sequence[str] | None) -> Self:
        """A tuple of the placements that remembers the order."""
        self = super().__new__(cls, tuple(placements))
        self.order = None if order is None else tuple(order)
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.order


class Arrangement(NamedTuple):
    """Placements under their own names, the order without what does not matter, the steps in that order.

    partitions: the steps that cut. by_runs: each says which indices of its dim a coord holds, so every
    region is a product. any_size: no placement looks at sizes beyond 0, 1 and more. foreign: a class is not
    the library's own: what it says is compared with each new shape.
    """

    placements: tuple[Placement, ...]
    order: Order
    applied: tuple[Applied, ...]
    partitions: tuple[Applied, ...]
    by_runs: bool
    any_size: bool
    foreign: bool


@remembered(16384)
def arranged(
    placements: tuple[Placement, ...], sizes: tuple[int, ...], shape: Shape, order: Order
) -> Arrangement:
    """Resolve and check placements as they were given, one per axis.

    Raises: PlacementError: a placement has no meaning for this shape or axis.
    """
    resolved = tuple([placement.resolved(len(shape)) for placement in placements])
    foreign = False
    for given, placement, n in zip(placements, resolved, sizes, strict=True):
        placement.validate(shape, n)
        if type(given) not in PLAIN and not is_own(given):
            check_dims(given, placement, shape, n)
            foreign = True
    named = by_own_names(complete(resolved, shape), sizes, order, shape)
    if order != tuple(range(len(order))):
        order = canonical(order, conflicts(named, sizes, shape))
    steps = applied_placements(named, sizes, order, len(shape))
    partitions = tuple([step for step in steps if step.partition is not None])
    by_runs = all(step.partition is not None and states_runs(step.partition) for step in partitions)
    any_size = all(placement.any_size for placement in named)
    if foreign:
        check_steps(steps, shape)
    return Arrangement(named, order, steps, partitions, by_runs, any_size, foreign)


def check_steps(steps: Sequence[Applied], shape: Shape) -> None:
    """Compare what classes that are not the library's own say with each shape that earlier axes leave them.

    Raises: PlacementError: one of them is no partition of it, or contradicts itself.
    """
    seen = {shape}
    for step in steps:
        part = step.partition
        mine = [left for left in seen if len(left) == len(shape)]
        for left in mine if part is not None and not is_own(part) else ():
            check_partition(part, left, step.size)
        seen = {step.local_shape(left, coord) for left in seen for coord in range(step.size)}


def check_pendings(steps: Sequence[Applied], dtype: torch.dtype) -> None:
    """Compare what pending classes that are not the library's own say of this dtype.

    Raises: PlacementError: one of them contradicts itself.
    """
    for step in steps:
        if step.pending is not None and not is_own(step.pending):
            check_pending(step.pending, step.size, dtype)


# ---------------------------------------------------------------------- order


def order_indices(order: Sequence[str], mesh: MeshShape) -> Order:
    """Axis positions in order of application; axes that are not named keep their place.

    Raises: LayoutError: an axis is named twice. MeshError: an axis does not exist.
    """
    if not isinstance(order, tuple | list):
        fix = f"names of axes, the first applied first, such as {mesh.axes}"
        order = as_several("order", order, LayoutError, fix=fix)
    named = [mesh.axis_index(name) for name in order]
    if len(set(named)) != len(named):
        raise LayoutError(f"order {tuple(order)} names an axis twice; name each once")
    following = iter(named)
    return tuple(next(following) if axis in named else axis for axis in range(len(mesh.axes)))


def conflicts(placements: Sequence[Placement], sizes: Sequence[int], shape: Shape) -> set[tuple[int, int]]:
    """Pairs of axes whose order matters, as (smaller, larger).

    Two partitions that touch a common dim, and two pendings that are different or have no name. A pending
    reduces elementwise, so it commutes with every partition.
    """
    touched = [
        frozenset(p.touched_dims(shape, n)) if isinstance(p, Partition) else frozenset()
        for p, n in zip(placements, sizes, strict=True)
    ]
    return {
        (a, b)
        for b in range(len(placements))
        for a in range(b)
        if touched[a] & touched[b] or _in_order(placements[a], placements[b])
    }


def _in_order(first: Placement, second: Placement) -> bool:
    """Two pendings that may not be swapped: all but two of one named or linear reduction."""
    if not isinstance(first, Pending) or not isinstance(second, Pending):
        return False
    return first != second or not (first.reduce_op or first.linear)


def canonical(order: Order, pairs: set[tuple[int, int]]) -> Order:
    """The smallest order that applies each pair as `order` does: equal for orders that mean the same."""
    if not pairs:
        return tuple(range(len(order)))
    place = {axis: position for position, axis in enumerate(order)}
    before: dict[int, set[int]] = {axis: set() for axis in order}
    for a, b in pairs:
        first, second = (a, b) if place[a] < place[b] else (b, a)
        before[second].add(first)
    out: list[int] = []
    while len(out) < len(order):
        out.append(min(axis for axis in order if axis not in out and before[axis] <= set(out)))
    return tuple(out)
