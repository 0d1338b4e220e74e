"""Two ways to say that one dim is cut by several axes, not from left to right: an order, or strided cuts.

`order=("tp", "dp")` with plain cuts, or left to right with `Interleaved` on the axes that come too early.
They hold the same where the sizes divide; elsewhere (7 rows, tp 2, dp 3) they differ, and the one is not
changed into the other.
"""

from __future__ import annotations

from itertools import product
from math import prod

from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout
from shardwright.layout.text import plain_cut
from shardwright.placement.base import Placement
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.shard import Shard


def to_strided(layout: Layout) -> Layout:
    """The same regions with plain cuts applied left to right, strided where an axis comes too early.

    Raises: LayoutError: the strided form would hold other elements.
    """
    strided = layout.with_placements(_strided_placements(layout))
    if not same_regions(layout, strided):
        raise LayoutError(
            f"{layout} cannot be said with strided cuts, left to right: the sizes do not divide, so ranks "
            "would differ"
        )
    return strided


def same_regions(first: Layout, second: Layout) -> bool:
    """Whether every rank holds the same elements in the same order. Asks every rank."""
    return first == second or (
        first.mesh_shape == second.mesh_shape
        and all(first.region(at) == second.region(at) for at in product(*map(range, first.sizes)))
    )


def _strided_placements(layout: Layout) -> tuple[Placement, ...]:
    """Each plain cut, strided by the axes to its right that cut the dim before it."""
    cut = {axis: dim for axis, p in enumerate(layout.placements) if (dim := plain_cut(p)) is not None}
    placements = list(layout.placements)
    for axis, dim in cut.items():
        before = layout.order[: layout.order.index(axis)]
        chunks = prod(layout.sizes[other] for other in before if other > axis and cut.get(other) == dim)
        placements[axis] = Shard(dim) if chunks == 1 else Interleaved(dim, chunks)
    return tuple(placements)
