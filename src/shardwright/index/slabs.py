"""A tensor cut into slabs: what a plan between two meshes moves one after the other, to save memory."""

from __future__ import annotations

from shardwright.index.region import Box

# More pieces than this would cost more time than the memory is worth.
_MOST = 256


def slab_counts(shape: tuple[int, ...]) -> list[int]:
    """In how many pieces to try: twice as many each time, at most one per index of the longest dim."""
    longest = min(max((*shape, 1)), _MOST)
    return [2**i for i in range(1, longest.bit_length()) if 2**i < longest] + [longest]


def slabs_of(shape: tuple[int, ...], count: int) -> list[Box]:
    """The tensor cut into `count` even slabs along its longest dim."""
    if not shape:
        return [Box((), ())]
    dim = shape.index(max(shape))
    slabs = []
    for i in range(count):
        low, high = shape[dim] * i // count, shape[dim] * (i + 1) // count
        offset = tuple(low if d == dim else 0 for d in range(len(shape)))
        slabs.append(Box(offset, (*shape[:dim], high - low, *shape[dim + 1 :])))
    return slabs
