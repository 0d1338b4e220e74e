"""Who holds what: a tensor cut at every boundary that any rank has, and the ranks that hold each block."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from shardwright.index.region import Region
from shardwright.index.runs import intervals
from shardwright.layout.layout import Layout

Span = tuple[int, int]  # first index, one past the last
_COLORS = (
    "#8dd3c7", "#ffffb3", "#bebada", "#fb8072", "#80b1d3", "#fdb462",
    "#b3de69", "#fccde5", "#d9d9d9", "#bc80bd", "#ccebc5", "#ffed6f",
)  # fmt: skip


@dataclass(frozen=True)
class Holders:
    """Per dim the spans between boundaries; per block (one span of each dim) the ranks that hold it.

    Cost: the blocks of every rank once; `limit` spans per dim at most, `cut_off` says what was left out.
    """

    spans: tuple[tuple[Span, ...], ...]
    ranks: dict[tuple[int, ...], tuple[int, ...]]
    cut_off: tuple[int, ...]

    def at(self, block: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that hold a block."""
        return self.ranks.get(block, ())


def holders_of(layout: Layout, *, limit: int) -> Holders:
    """The holders of each block of a layout's tensor."""
    regions = [(rank, layout.region(layout.coords_of(rank))) for rank in layout.ranks]
    spans, cut_off = [], []
    for dim, size in enumerate(layout.shape):
        edges = sorted({0, size}.union(*(_edges(region, dim) for _, region in regions)))
        spans.append(tuple(pairwise(edges))[:limit])
        cut_off.append(size - spans[-1][-1][1] if spans[-1] else 0)
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, region in regions:
        for block in _blocks(region, spans):
            ranks.setdefault(block, []).append(rank)
    return Holders(tuple(spans), {block: tuple(held) for block, held in ranks.items()}, tuple(cut_off))


def _pieces(region: Region, dim: int) -> Iterable[Span]:
    if region.runs is not None:
        return ((offset, offset + size) for offset, size in intervals(region.runs[dim]))
    return ((box.offset[dim], box.offset[dim] + box.size[dim]) for box in region.boxes)


def _edges(region: Region, dim: int) -> set[int]:
    return {edge for piece in _pieces(region, dim) for edge in piece} if region.numel else set()


def _blocks(region: Region, spans: list[tuple[Span, ...]]) -> Iterator[tuple[int, ...]]:
    """The blocks that a region consists of."""
    if not region.numel:
        return
    starts = [[start for start, _ in of_dim] for of_dim in spans]
    if region.runs is not None:
        yield from product(*(_inside(_pieces(region, dim), at) for dim, at in enumerate(starts)))
        return
    for box in region.boxes:
        sides = zip(box.offset, box.size, starts, strict=True)
        yield from product(*(_inside([(offset, offset + size)], at) for offset, size, at in sides))


def _inside(pieces: Iterable[Span], starts: list[int]) -> list[int]:
    return [i for low, high in pieces for i in range(bisect_left(starts, low), bisect_left(starts, high))]


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`0-3, 8` for ranks 0, 1, 2, 3 and 8."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def color_of(ranks: tuple[int, ...]) -> str:
    """A color for a set of ranks, the same in text, SVG and HTML: that of its first; white for nobody."""
    return _COLORS[min(ranks) % len(_COLORS)] if ranks else "#ffffff"
