"""Two ways to say that one dim is cut by several axes, not from left to right: an order, or strided cuts.

`order=("tp", "dp")` with plain cuts, or left to right with `Interleaved` on the axes that come too early.
They hold the same where the sizes divide; elsewhere (7 rows, tp 2, dp 3) they differ, and neither is changed
into the other.
"""

from __future__ import annotations

from itertools import permutations, product
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
    return _if_same(
        layout, layout.with_placements(_strided_placements(layout)), "strided cuts, left to right"
    )


def to_ordered(layout: Layout) -> Layout:
    """The same regions with plain cuts and an order of application in place of strided cuts.

    Raises: LayoutError: no order of plain cuts holds the same elements.
    """
    strided = {axis: dim for axis, p in enumerate(layout.placements) if (dim := _strided_dim(p)) is not None}
    plain = layout.with_placements({layout.axes[axis]: Shard(dim) for axis, dim in strided.items()})
    for order in permutations(layout.axes) if strided else ():
        candidate = layout.with_placements(plain.placements, order)
        if _strided_placements(candidate) == layout.placements and same_regions(candidate, layout):
            return candidate
    return _if_same(layout, plain, "plain cuts in any order")


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


def _strided_dim(placement: Placement) -> int | None:
    dim, chunks = getattr(placement, "dim", None), getattr(placement, "chunks", None)
    strided = dim is not None and chunks is not None and placement == Interleaved(dim, chunks)
    return dim if strided else None


def _if_same(layout: Layout, other: Layout, words: str) -> Layout:
    if not same_regions(layout, other):
        raise LayoutError(
            f"{layout} cannot be said with {words}: the sizes do not divide, so ranks would differ"
        )
    return other
