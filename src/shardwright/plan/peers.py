"""What one rank shares with each of its peers, from the tables of lines: dim by dim, not peer by peer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

import numpy as np

from shardwright.index.grid import Grid, Overlap, Stretch, overlaps, stretches
from shardwright.plan.holders import Coords, Map
from shardwright.plan.lines import Ints
from shardwright.plan.shared import Meeting, meet

Overlaps = tuple[Overlap, ...]
# Per dim: the axes that tell a peer's part of it, and for each of their coordinates what is shared.
_Side = tuple[tuple[int, ...], dict[Coords, tuple[Stretch, ...]]]


def shared_with_peers(
    source: Map, target: Map, axes: Sequence[int], coords: Coords, members: Sequence[Coords]
) -> Iterator[tuple[Overlaps, Overlaps]]:
    """For each member: what it has of what this rank wants, and what it wants of what this rank has.

    Members differ from this rank on these axes only. Only this rank's side of an overlap has the memory
    of its tensor.
    """
    if not (source.is_product and target.is_product):
        mine, wanted = source.cell(coords), target.cell(coords)
        for peer in members:
            yield overlaps(source.cell(peer), wanted), overlaps(mine, target.cell(peer))
        return
    crossed = frozenset(axes)
    incoming, outgoing = [], []
    for meeting in _meetings(source, target):
        incoming.append(_side(meeting, coords, crossed, of_peer=meeting.source.axes))
        outgoing.append(_side(meeting, coords, crossed, of_peer=meeting.target.axes))
    here, there = _grid(source, coords), _grid(target, coords)
    for peer in members:
        yield _overlaps(incoming, peer, here, there), _overlaps(outgoing, peer, here, there)


def _meetings(source: Map, target: Map) -> list[Meeting]:
    return [meet(mine, theirs) for mine, theirs in zip(source.lines, target.lines, strict=True)]


def _grid(which: Map, coords: Coords) -> Grid:
    """The memory of a local tensor; which indices of it are shared, an overlap says itself."""
    return Grid((), 0, which.local_stride(coords))


def _side(meeting: Meeting, coords: Coords, crossed: frozenset[int], of_peer: tuple[int, ...]) -> _Side:
    """What of one dim each coordinate of a peer shares with this rank."""
    source, target = meeting.source, meeting.target
    at_peer, at_here = (source.at, target.at) if of_peer is source.axes else (target.at, source.at)
    row_peer, row_here = (
        (meeting.of_source, meeting.of_target)
        if of_peer is source.axes
        else (meeting.of_target, meeting.of_source)
    )
    kept = np.ones(len(row_here), dtype=bool)
    for axis, at in at_here.items():
        kept &= at[row_here] == coords[axis]
    for axis, at in at_peer.items():
        if axis not in crossed:
            kept &= at[row_peer] == coords[axis]
    telling = tuple(axis for axis in of_peer if axis in crossed)
    rows = np.flatnonzero(kept)
    return telling, _by_peer(meeting, rows, [at_peer[axis][row_peer[rows]] for axis in telling])


def _by_peer(meeting: Meeting, rows: Ints, peer: list[Ints]) -> dict[Coords, tuple[Stretch, ...]]:
    """Shared pieces as stretches in the target's order, per coordinate of the peer."""
    i, j, low = meeting.of_source[rows], meeting.of_target[rows], meeting.low[rows, 0]
    source, target = meeting.source, meeting.target
    at_source = cast("Ints", source.position)[i] + low - source.low[i, 0]
    at_target = cast("Ints", target.position)[j] + low - target.low[j, 0]
    order = np.lexsort((at_target, *reversed(peer)))
    columns = [column[order].tolist() for column in (*peer, at_source, at_target, meeting.size[rows, 0])]
    width = len(peer)
    found = groupby(zip(*columns, strict=True), key=lambda row: row[:width])
    return {key: stretches([row[width:] for row in of_key]) for key, of_key in found}


def _overlaps(sides: Sequence[_Side], peer: Coords, here: Grid, there: Grid) -> Overlaps:
    dims = []
    for axes, found in sides:
        common = found.get(tuple([peer[axis] for axis in axes]))
        if common is None:
            return ()
        dims.append(common)
    return (Overlap(here, there, tuple(dims)),)
