"""What a plan moves and the least that any could move, in elements.

Notation: E elements; phi, psi: an element's coordinates in the source and in the target; C: the axes that
cut in both. M: the elements with phi == psi on every axis of C. t: the product of the sizes of the axes that
do not cut in the target (ranks that need an element). q: the same for the Pending axes that are reduced
(terms of an element). Axes whose Pending stays ("kept") never cross: they multiply everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from shardwright.layout.layout import Layout
from shardwright.plan.grid import numel, shared
from shardwright.plan.maps import Coords, Map, every_coords, unchanged_axes
from shardwright.plan.steps import AllReduce, Exchange, LocalMove, Pieces, Place, Step
from shardwright.plan.transfer import members_of


@lru_cache(maxsize=256)  # one plan asks several times
def matching(source: Map, target: Map) -> int:
    """M: how many elements are at the same coordinates of all axes that cut in both."""
    if source.cut & target.cut <= unchanged_axes(source, target):
        return target.elements
    sizes = _only(source.sizes, source.cut | target.cut)
    return sum(shared(source.cell(coords), target.cell(coords)) for coords in every_coords(sizes))


def lower_bound(source: Map, target: Map, reduced: Iterable[int], kept: Iterable[int]) -> int:
    """The fewest elements that can cross between ranks, over all ranks.

    Without terms each rank needs what it wants and does not hold: `E t - r M`, r the ranks that hold equal
    copies. With q terms, q - 1 messages arrive before the first rank is complete (q if no holder wants the
    element) and every other rank needs one more: `E (q - 1 + t) - M`.
    """
    sizes = source.sizes
    kept_axes = frozenset(kept)
    copies = prod(sizes[axis] for axis in kept_axes)
    terms = prod(sizes[axis] for axis in reduced)
    wanting = _product(sizes, target.cut | kept_axes)
    common = matching(source, target)
    if terms == 1:
        return copies * (
            target.elements * wanting - _product(sizes, source.cut | target.cut | kept_axes) * common
        )
    return copies * (target.elements * (terms - 1 + wanting) - common)


def _product(sizes: tuple[int, ...], without: frozenset[int]) -> int:
    return prod(size for axis, size in enumerate(sizes) if axis not in without)


def exchanged(step: Exchange) -> int:
    """How many elements cross between ranks in an exchange, over all ranks."""
    source, target, sizes = step.source, step.target, step.source.sizes
    own = matching(source, target) * _product(sizes, source.cut | target.cut)
    return step.term_count * target.elements * _product(sizes, target.cut) - own


def _only(sizes: tuple[int, ...], axes: frozenset[int]) -> tuple[int, ...]:
    return tuple(size if axis in axes else 1 for axis, size in enumerate(sizes))


def all_reduced(step: AllReduce) -> int:
    """How many elements cross between ranks in a native all-reduce, over all ranks."""
    moved = step.map
    n = moved.sizes[step.axis]
    return 2 * (n - 1) * moved.elements * _product(moved.sizes, moved.cut | {step.axis})


def traffic(step: AllReduce | Exchange) -> dict[Coords, tuple[int, int]]:
    """Elements that each rank sends and receives."""
    if isinstance(step, AllReduce):
        n = step.map.sizes[step.axis]
        moved = {
            coords: -(-2 * (n - 1) * numel(step.map.cell(coords)) // n)
            for coords in every_coords(step.map.sizes)
        }
        return {coords: (amount, amount) for coords, amount in moved.items()}
    return _exchange_traffic(step)


def _exchange_traffic(step: Exchange) -> dict[Coords, tuple[int, int]]:
    ranks = every_coords(step.source.sizes)
    sent, got = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    for coords in ranks:
        wanted = step.target.cell(coords)
        for peer in members_of(step, coords):
            amount = shared(step.source.cell(peer), wanted) if peer != coords else 0
            sent[peer] += amount
            got[coords] += amount
    return {coords: (sent[coords], got[coords]) for coords in ranks}


def held(step: Step, result: Layout) -> int:
    """The most elements that one rank holds in a step beside its input: what it makes, and buffers."""
    if isinstance(step, Pieces):
        inside = max(held(inner, result) for part in step.parts for inner in part)
        return inside + _largest(step.target)
    if isinstance(step, AllReduce):
        return _largest(step.map)
    if isinstance(step, Exchange):
        return _held_by_exchange(step)
    if isinstance(step, LocalMove | Place):
        return _largest(step.target)
    return 2 * max(prod(result.local_shape(coords)) for coords in every_coords(result.sizes))


def _largest(which: Map) -> int:
    return max(numel(which.cell(coords)) for coords in every_coords(_only(which.sizes, which.cut)))


def _held_by_exchange(step: Exchange) -> int:
    """The result and both buffers (the own part may travel through them), or the terms while they combine."""
    most = 0
    for coords, (sent, got) in traffic(step).items():
        wanted = step.target.cell(coords)
        own = shared(step.source.cell(coords), wanted)
        combining = 2 * numel(wanted) if step.terms else 0
        most = max(most, step.term_count * numel(wanted) + max(sent + max(got, own), combining))
    return most
