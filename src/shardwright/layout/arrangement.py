"""What follows from placements, mesh sizes and shape of a layout, worked out once for all alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwright.layout.applied import applied_placements, by_own_names, complete
from shardwright.layout.order import canonical, conflicts
from shardwright.placement.one_dim import states_runs
from shardwright.remember import remembered

if TYPE_CHECKING:
    from shardwright.index.region import Shape
    from shardwright.layout.applied import Applied
    from shardwright.layout.order import Order
    from shardwright.placement.base import Placement


class Arrangement(NamedTuple):
    """Placements under their own names, the order without what does not matter, the steps in that order.

    partitions: the steps that cut. by_runs: each says which indices of its dim a coord holds, so every
    region is a product.
    """

    placements: tuple[Placement, ...]
    order: Order
    applied: tuple[Applied, ...]
    partitions: tuple[Applied, ...]
    by_runs: bool


@remembered(16384)
def arranged(
    placements: tuple[Placement, ...], sizes: tuple[int, ...], shape: Shape, order: Order
) -> Arrangement:
    """Resolve and check placements as they were given, one per axis.

    Raises: PlacementError: a placement has no meaning for this shape or axis.
    """
    resolved = tuple([placement.resolved(len(shape)) for placement in placements])
    for placement, n in zip(resolved, sizes, strict=True):
        placement.validate(shape, n)
    named = by_own_names(complete(resolved, shape), sizes, order, shape)
    if order != tuple(range(len(order))):
        order = canonical(order, conflicts(named, sizes, shape))
    steps = applied_placements(named, sizes, order, len(shape))
    partitions = tuple([step for step in steps if step.partition is not None])
    by_runs = all(step.partition is not None and states_runs(step.partition) for step in partitions)
    return Arrangement(named, order, steps, partitions, by_runs)
