"""A region as few boxes, each with a view of the local tensor: what a checkpoint writes and reads.

Unlike `Region.boxes` they need not lie one after the other in the local tensor: the columns of a tall matrix
are one chunk each, not one box per row.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from torch import Tensor

from shardwright.index.region import Box, Region
from shardwright.index.runs import Runs, intervals


class Chunk(NamedTuple):
    """`box` of the whole tensor is `inside` of the local tensor, or lies flat in it from element `start`."""

    box: Box
    inside: Box | None
    start: int

    def view(self, local: Tensor) -> Tensor:
        """The chunk's part of a local tensor: a view, so that what is read into it arrives.

        Raises: RuntimeError: several boxes lie in a local tensor that is not contiguous (torch's view).
        """
        if self.inside is not None:
            return local[self.inside.slices]
        return local.view(-1).narrow(0, self.start, self.box.numel).view(self.box.size)


def chunks_of(region: Region) -> tuple[Chunk, ...]:
    """The chunks of a region, in an order that is the same on every rank; none when it is empty."""
    if not region.numel:
        return ()
    if region.runs is None:
        return _flat_chunks(region.boxes)
    sides = (_sides(of_dim) for of_dim in region.runs)
    return tuple(_product_chunk(cell) for cell in product(*sides))


def _sides(runs: Runs) -> list[tuple[int, int, int]]:
    """Offset, size and local position of every interval."""
    sides, position = [], 0
    for offset, size in intervals(runs):
        sides.append((offset, size, position))
        position += size
    return sides


def _product_chunk(cell: tuple[tuple[int, int, int], ...]) -> Chunk:
    size = tuple(size for _, size, _ in cell)
    outside = Box(tuple(offset for offset, _, _ in cell), size)
    return Chunk(outside, Box(tuple(position for _, _, position in cell), size), 0)


def _flat_chunks(boxes: tuple[Box, ...]) -> tuple[Chunk, ...]:
    chunks, start = [], 0
    for box in boxes:
        chunks.append(Chunk(box, None, start))
        start += box.numel
    return tuple(chunks)
