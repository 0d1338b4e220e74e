"""The step in which ranks of one mesh send each other exactly what is missing; its messages and its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import cast

import numpy as np
import torch

from shardwright.index.grid import Grid
from shardwright.index.overlap import (
    Overlap,
    Stretch,
    overlaps,
    paired_views,
    source_views,
    stretches,
    target_views,
)
from shardwright.plan.cost import matching, over_all_ranks, shared_counts, without
from shardwright.plan.holders import Coords, Map
from shardwright.plan.lines import Ints
from shardwright.plan.shared import Meeting, meet
from shardwright.plan.step import Holds, Step
from shardwright.plan.work import Memory, Move, Seat, Share, Transfer

Overlaps = tuple[Overlap, ...]
# Per dim: the axes that tell a peer's part of it, and for each of their coordinates what is shared.
_Side = tuple[tuple[int, ...], dict[Coords, tuple[Stretch, ...]]]


@dataclass(frozen=True, eq=False)
class Exchange(Step):
    """Ranks that differ on `axes` send each other exactly the missing elements.

    terms: the reduced axes, in order; the result then has one term per coordinate of them.
    gather: all members send their whole local tensor, of one size, to all: the native all-gather serves.
    """

    source: Map
    target: Map
    axes: tuple[int, ...]
    terms: tuple[int, ...] = ()
    gather: bool = False

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """One, unless every rank is alone."""
        return 1 if self.axes else 0

    @cached_property
    def term_count(self) -> int:
        """How many terms of each element arrive."""
        return prod(map(self.source.sizes.__getitem__, self.terms))

    @property
    def form(self) -> tuple[object, ...]:
        """Over the same axes, of the same kind."""
        return (type(self), self.axes, self.terms, self.gather)

    def describe(self, axes: tuple[str, ...]) -> str:
        """One line for `str(plan)`."""
        what = "all-gather" if self.gather else "exchange"
        kept = " of the terms" if self.terms else " of the missing elements"
        names = [axes[axis] for axis in self.axes]
        return f"{what}{kept} over {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}"

    # ------------------------------------------------------------------------------------------- bytes

    @cached_property
    def moved(self) -> int:  # type: ignore[override]
        """How many elements cross between ranks."""
        source, target, sizes = self.source, self.target, self.source.sizes
        own = matching(source, target) * without(sizes, source.cut | target.cut)
        return self.term_count * target.elements * without(sizes, target.cut) - own

    def traffic(self) -> tuple[Ints, Ints]:
        """Elements that each rank sends and receives."""
        source, target, sizes = self.source, self.target, self.source.sizes
        own = shared_counts(source, target)
        every_peer = prod(sizes[axis] for axis in self.axes if axis not in target.cut)
        tied = frozenset(range(len(sizes))) - frozenset(self.axes)
        sent = every_peer * shared_counts(source, target, tied) - own
        return sent, self.term_count * target.counts - own

    def crossing(self, slow: frozenset[int]) -> int:
        """Elements that cross between ranks which differ on one of these axes."""
        source, target, sizes = self.source, self.target, self.source.sizes
        near = frozenset(self.axes) - slow
        tied = frozenset(range(len(sizes))) - near
        every_peer = prod(sizes[axis] for axis in near if axis not in target.cut)
        within = every_peer * over_all_ranks(shared_counts(source, target, tied), sizes)
        return self.term_count * over_all_ranks(target.counts, sizes) - within

    def holds(self, term: Ints, dtype: torch.dtype) -> Holds:  # noqa: ARG002 - as many of any
        """The result, what is sent, and what arrives or, in a collective, the own part if that is more."""
        sent, got = self.traffic()
        wanted = self.target.counts
        made = self.term_count * wanted
        late = sent + np.maximum(got, shared_counts(self.source, self.target))
        return Holds(made + late, made, wanted, late)

    # ---------------------------------------------------------------------------------------- messages

    def members(self, coords: Coords) -> tuple[Coords, ...]:
        """The coordinates that differ from these only on the axes of the exchange, row-major."""
        sizes = enumerate(self.source.sizes)
        return tuple(product(*[range(n) if axis in self.axes else (coords[axis],) for axis, n in sizes]))

    def work(self, seat: Seat) -> Transfer:
        """The messages of one rank, to itself included."""
        coords = cast("Coords", seat)
        shares: dict[Coords, Share] = {}
        own: Overlaps = ()
        members = self.members(coords)
        held, slot = self.source.memory(coords), self.target.memory(coords)
        shared = shared_with_peers(self.source, self.target, self.axes, coords, members, (held, slot))
        for peer, (incoming, outgoing) in zip(members, shared, strict=True):
            to, of = tuple(source_views(outgoing)), tuple(target_views(incoming))
            shares[peer] = Share(peer, to, of, self._term(peer) if self.terms else 0)
            own = incoming if peer == coords else own
        if self.gather:
            whole = shares[coords].send
            shares = {peer: Share(peer, whole, share.receive) for peer, share in shares.items()}
        return Transfer(
            kept=Move(held, slot, tuple(paired_views(own))),
            own=coords,
            shares=tuple(shares.values()),
            terms=self.term_count if self.terms else 0,
            own_term=self._term(coords) if self.terms else 0,
            axes=self.axes,
            gather=self.gather,
            moved=self.moved,
            repeated=bool(self.terms) or not self.target.cut.issuperset(self.axes),
        )

    def _term(self, peer: Coords) -> int:
        term = 0
        for axis in self.terms:
            term = term * self.source.sizes[axis] + peer[axis]
        return term


# -------------------------------------------------------------- what one rank shares with each of its peers
# From the tables of lines: dim by dim, not peer by peer.


def shared_with_peers(
    source: Map,
    target: Map,
    axes: Sequence[int],
    coords: Coords,
    members: Sequence[Coords],
    memory: tuple[Memory, Memory],
) -> Iterator[tuple[Overlaps, Overlaps]]:
    """For each member: what it has of what this rank wants, and what it wants of what this rank has.

    Members differ from this rank on these axes only. Only this rank's side of an overlap has the memory
    of its tensor: `memory`, before and after.
    """
    if not source.is_product:  # then the target is none either: they have the same groups
        mine, wanted = source.cell(coords), target.cell(coords)
        for peer in members:
            yield overlaps(source.cell(peer), wanted), overlaps(mine, target.cell(peer))
        return
    crossed = frozenset(axes)
    incoming, outgoing = [], []
    for before, after in zip(source.lines, target.lines, strict=True):
        meeting = meet(before, after)
        incoming.append(_side(meeting, coords, crossed, of_peer=before.axes))
        outgoing.append(_side(meeting, coords, crossed, of_peer=after.axes))
    # The memory alone: which indices of it are shared, an overlap says itself.
    here, there = Grid((), 0, memory[0].stride), Grid((), 0, memory[1].stride)
    for peer in members:
        yield _overlaps(incoming, peer, here, there), _overlaps(outgoing, peer, here, there)


def _side(meeting: Meeting, coords: Coords, crossed: frozenset[int], of_peer: tuple[int, ...]) -> _Side:
    """What of one dim each coordinate of a peer shares with this rank."""
    source, target = meeting.source, meeting.target
    if source is target and not source.at and len(source.low) == 1 and source.position is not None:
        # The same on every rank: most dims of most moves.
        position, length = int(source.position[0]), int(source.size[0, 0])
        return (), {(): (Stretch(position, position, length, 1, 0, 0),)}
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
    rows = np.flatnonzero(kept)
    telling: list[int] = []
    peer: list[Ints] = []
    for axis in of_peer:
        if axis in crossed:
            telling.append(axis)
            peer.append(at_peer[axis][row_peer[rows]])
    return tuple(telling), _by_peer(meeting, rows, peer)


def _by_peer(meeting: Meeting, rows: Ints, peer: list[Ints]) -> dict[Coords, tuple[Stretch, ...]]:
    """Shared pieces as stretches in the target's order, per coordinate of the peer."""
    i, j, low = meeting.of_source[rows], meeting.of_target[rows], meeting.low[rows, 0]
    source, target = meeting.source, meeting.target
    at_source = cast("Ints", source.position)[i] + low - source.low[i, 0]
    at_target = cast("Ints", target.position)[j] + low - target.low[j, 0]
    table = np.column_stack([*peer, at_source, at_target, meeting.size[rows, 0]])
    found: dict[Coords, list[tuple[int, int, int]]] = {}
    for *key, mine, theirs, size in table[np.argsort(at_target, kind="stable")].tolist():
        found.setdefault(tuple(key), []).append((mine, theirs, size))
    return {key: stretches(common) for key, common in found.items()}


def _overlaps(sides: Sequence[_Side], peer: Coords, here: Grid, there: Grid) -> Overlaps:
    dims = []
    for axes, found in sides:
        common = found.get(tuple(map(peer.__getitem__, axes)))
        if common is None:
            return ()
        dims.append(common)
    return (Overlap(here, there, tuple(dims)),)
