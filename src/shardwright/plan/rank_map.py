"""What each rank of the world holds of a tensor, whatever mesh says so.

A `Map` speaks of coordinates on one mesh. Between two meshes only ranks have a common meaning: a `RankMap`
lists the distinct cells and, for each, the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple, cast

import numpy as np

from shardwright.index.grid import Cell, flat_cell, numel
from shardwright.index.overlap import shared_boxes
from shardwright.index.region import Box
from shardwright.layout.layout import Layout
from shardwright.plan.holders import LayoutMap, every_coords
from shardwright.plan.lines import Ints
from shardwright.plan.work import Memory, Seat


@dataclass(frozen=True, slots=True)
class Part:
    """One cell and who holds it.

    groups: the replicas; in each, one rank per term (coordinate on the Pending axes), the first term first.
    """

    cell: Cell
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everybody who holds the cell or a term of it."""
        return tuple(rank for group in self.groups for rank in group)

    def holders(self, term: int) -> tuple[int, ...]:
        """Those who hold one term of it, in rank order."""
        return tuple(sorted(group[term] for group in self.groups))


class Place(NamedTuple):
    """Where a rank stands in a map: which part, which replica of it, which term."""

    part: int
    group: int
    term: int


@dataclass(frozen=True, eq=False)
class RankMap:
    """Disjoint parts that cover the elements; every rank is in one part, or in none and holds nothing.

    ranks: everybody in either of the two meshes. layout: whose local tensors these are. None: local tensors
    are flat, boxes one after the other.
    """

    parts: tuple[Part, ...]
    ranks: tuple[int, ...]
    layout: Layout | None = None
    _memories: dict[int, Memory] = field(default_factory=dict, repr=False)

    @cached_property
    def terms(self) -> int:
        """How many terms each element has."""
        return max((len(part.groups[0]) for part in self.parts), default=1)

    @cached_property
    def place_of(self) -> dict[int, Place]:
        """The place of every rank that is in a part."""
        return {
            rank: Place(index, replica, term)
            for index, part in enumerate(self.parts)
            for replica, group in enumerate(part.groups)
            for term, rank in enumerate(group)
        }

    @cached_property
    def counts(self) -> Ints:
        """How many elements each of `ranks` holds."""
        return np.array([self.memory(rank).numel for rank in self.ranks], dtype=np.int64)

    def coords(self, seat: Seat) -> tuple[int, ...]:
        """Where a rank is on the layout's mesh; () for a rank that is not on it."""
        rank = cast("int", seat)
        return self.layout.coords_of(rank) if self.layout is not None and rank in self.place_of else ()

    def cell(self, seat: Seat) -> Cell:
        """What a rank holds."""
        place = self.place_of.get(cast("int", seat))
        return () if place is None else self.parts[place.part].cell

    def memory(self, seat: Seat) -> Memory:
        """Shape and stride of a rank's local tensor; (0,) for a rank that is not part of it."""
        rank = cast("int", seat)
        known = self._memories.get(rank)
        if known is None:
            known = self._memories[rank] = self._memory(rank)
        return known

    def _memory(self, rank: int) -> Memory:
        if self.layout is None or rank not in self.place_of:
            return Memory((numel(self.cell(rank)),), (1,))
        return LayoutMap(self.layout).memory(self.coords(rank))


def rank_map(layout: Layout, everybody: tuple[int, ...]) -> RankMap:
    """The map of a layout: its Pending axes number the terms, its replicated axes the replicas."""
    holding = LayoutMap(layout)
    pending = [axis for axis in layout.order if layout.placements[axis].is_pending]
    free = [axis for axis in range(len(layout.sizes)) if axis not in holding.cut and axis not in pending]
    cells: dict[tuple[int, ...], Cell] = {}
    groups_of: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for coords in every_coords(layout.sizes):
        cut = tuple(coords[axis] for axis in sorted(holding.cut))
        if cut not in cells:
            cells[cut] = holding.cell(coords)
        replica = tuple(coords[axis] for axis in free)
        groups_of.setdefault(cut, {}).setdefault(replica, []).append(layout.mesh_shape.rank_at(coords))
    by_term = _TermOrder(layout, pending)
    parts = (
        Part(cells[cut], tuple(by_term.sort(group) for group in groups.values()))
        for cut, groups in groups_of.items()
    )
    return RankMap(tuple(parts), everybody, layout)


class _TermOrder:
    """Ranks by their coordinates on the Pending axes, in the order in which these are applied."""

    def __init__(self, layout: Layout, pending: list[int]) -> None:
        self.layout, self.pending = layout, pending

    def sort(self, group: list[int]) -> tuple[int, ...]:
        return tuple(sorted(group, key=self._term))

    def _term(self, rank: int) -> tuple[int, ...]:
        coords = self.layout.coords_of(rank)
        return tuple(coords[axis] for axis in self.pending)


def slab_of(whole: RankMap, slab: Box) -> RankMap:
    """The same ranks with those elements only that are inside a box."""
    inside = flat_cell((slab,))
    return RankMap(
        tuple(Part(flat_cell(tuple(shared_boxes(part.cell, inside))), part.groups) for part in whole.parts),
        whole.ranks,
    )


def homes(source: RankMap, target: RankMap) -> RankMap:
    """One rank for every element, where its terms are combined before the value is sent on.

    A rank that holds a term and wants the value, if there is one; else one of the holders or one of those
    that want it, whichever are more. The elements are cut evenly over all such ranks.
    """
    boxes: dict[int, list[Box]] = {}
    for mine in source.parts:
        for theirs in target.parts:
            common = shared_boxes(mine.cell, theirs.cell)
            if not common:
                continue
            ranks = _candidates(set(mine.ranks), set(theirs.ranks))
            for rank, share in zip(ranks, divided(common, len(ranks)), strict=True):
                boxes.setdefault(rank, []).extend(share)
    parts = tuple(Part(flat_cell(tuple(boxes[rank])), ((rank,),)) for rank in sorted(boxes))
    return RankMap(parts, source.ranks)


def _candidates(holders: set[int], wanting: set[int]) -> list[int]:
    if holders & wanting:
        return sorted(holders & wanting)
    return sorted(wanting if len(wanting) == 1 or len(wanting) > len(holders) else holders)


def divided(boxes: Sequence[Box], parts: int) -> list[list[Box]]:
    """The boxes in their order, cut into `parts` lists of almost equally many elements."""
    total = sum(box.numel for box in boxes)
    shares: list[list[Box]] = [[] for _ in range(parts)]
    position = 0
    for box in boxes:
        for part in range(parts):
            low = max(total * part // parts - position, 0)
            high = min(total * (part + 1) // parts - position, box.numel)
            piece = rows_of(box, low, high) if low < high else None
            if piece is not None:
                shares[part].append(piece)
        position += box.numel
    return shares


def rows_of(box: Box, low: int, high: int) -> Box | None:
    """Elements `[low, high)` of a box, both rounded down to whole slices of its longest dim."""
    if low == 0 and high == box.numel:
        return box
    dim = box.size.index(max(box.size))
    slice_size = prod(box.size) // box.size[dim]
    first, last = low // slice_size, high // slice_size
    if first == last:
        return None
    offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
    return Box(offset, (*box.size[:dim], last - first, *box.size[dim + 1 :]))
