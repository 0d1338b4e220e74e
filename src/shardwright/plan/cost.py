"""What two maps share, and the least that any plan between them could move, in elements.

Notation: E elements; phi, psi: an element's coordinates in the source and in the target; C: the axes that
cut in both. M: the elements with phi == psi on every axis of C. t: the product of the sizes of the axes that
do not cut in the target (ranks that need an element). q: the same for the Pending axes that are reduced
(terms of an element). Axes whose Pending stays ("kept") never cross: they multiply everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np

from shardwright.plan.holders import Map
from shardwright.plan.lines import Ints
from shardwright.plan.shared import meet
from shardwright.remember import remembered


def shared_counts(source: Map, target: Map, tied: frozenset[int] | None = None) -> Ints:
    """How many elements the source's coordinate and the target's share: one dim per axis of the mesh.

    The two are the same coordinate on the axes `tied` (None: on all), else the target's counts for all its
    values together. A dim is 1 long where the axis makes no difference.
    """
    counts = np.ones((1,) * len(source.sizes), dtype=np.int64)
    for mine, theirs in zip(source.lines, target.lines, strict=True):
        wanted = frozenset(theirs.at) if tied is None else tied & frozenset(theirs.at)
        counts = counts * meet(mine, theirs).count(frozenset(mine.at), wanted, source.sizes)
    return counts


@remembered(256)  # one plan asks several times
def matching(source: Map, target: Map) -> int:
    """M: how many elements are at the same coordinates of all axes that cut in both."""
    return int(shared_counts(source, target).sum())


def lower_bound(source: Map, target: Map, reduced: Iterable[int], kept: Iterable[int]) -> int:
    """The fewest elements that can cross between ranks, over all ranks.

    Without terms each rank needs what it wants and does not hold: `E t - r M`, r the ranks that hold equal
    copies. With q terms, q - 1 messages arrive before the first rank is complete (q if no holder wants the
    element) and every other rank needs one more: `E (q - 1 + t) - M`.
    """
    sizes = source.sizes
    kept_axes = frozenset(kept)
    copies = prod(map(sizes.__getitem__, kept_axes))
    terms = prod(map(sizes.__getitem__, reduced))
    wanting = without(sizes, target.cut | kept_axes)
    common = matching(source, target)
    if terms == 1:
        return copies * (
            target.elements * wanting - without(sizes, source.cut | target.cut | kept_axes) * common
        )
    return copies * (target.elements * (terms - 1 + wanting) - common)


def without(sizes: tuple[int, ...], axes: frozenset[int]) -> int:
    """How many ranks differ on the axes that are not among these."""
    ranks = 1
    for axis, size in enumerate(sizes):
        if axis not in axes:
            ranks *= size
    return ranks


def over_all_ranks(counts: Ints, sizes: tuple[int, ...]) -> int:
    """The sum over all ranks of counts with dims 1 long where an axis makes no difference."""
    return int(counts.sum()) * (prod(sizes) // counts.size)
