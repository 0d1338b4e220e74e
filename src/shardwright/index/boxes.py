"""A region as few boxes, each with a view of the local tensor: what a checkpoint writes and reads.

Unlike `Region.boxes` they need not lie one after the other in the local tensor: the columns of a tall matrix
are one chunk each, not one box per row.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from torch import Tensor

from shardwright.index.grid import Interval, positioned
from shardwright.index.region import Box, Region


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
    return tuple(_product_chunk(cell) for cell in product(*map(positioned, region.runs)))


def _product_chunk(sides: tuple[Interval, ...]) -> Chunk:
    size = tuple(side.size for side in sides)
    outside = Box(tuple(side.offset for side in sides), size)
    return Chunk(outside, Box(tuple(side.position for side in sides), size), 0)


def _flat_chunks(boxes: tuple[Box, ...]) -> tuple[Chunk, ...]:
    chunks, start = [], 0
    for box in boxes:
        chunks.append(Chunk(box, None, start))
        start += box.numel
    return tuple(chunks)
