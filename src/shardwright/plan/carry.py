"""The step that moves elements between ranks of two meshes, and who sends what to whom in it.

A rank that holds an element keeps it. All others get it from a rank that holds it, and those who hold the
same cell send equal shares of what is missing elsewhere: no rank of them sends everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch

from shardwright.index.overlap import Overlap, Strided, overlaps, paired_views, source_views, target_views
from shardwright.index.shares import Counts, cut_overlaps, shared_counts
from shardwright.plan.rank_map import Part, Place, RankMap
from shardwright.plan.step import Holds, Step
from shardwright.plan.work import Filling, Move, Seat, Share, Transfer

# Smaller pieces are not cut: a message more costs more than these bytes.
_CUT_BYTES = 64 * 1024


class Wanted(Enum):
    """Who wants an element, or a term of it.

    EVERY: each rank that the target names. ONE: of each group of ranks whose locals will be reduced, one.
    SAME: of each group, the rank at the term's own place.
    """

    EVERY = "every"
    ONE = "one"
    SAME = "same"


class Delivery(NamedTuple):
    """Elements number `low` to `high` of what the source part of `sender` shares with `target_part`."""

    sender: int
    receiver: int
    target_part: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Carry(Step):
    """Bring elements, or terms of them, from the ranks of one map to those of another.

    stacked: the result is one tensor per term. filling: what it holds where nothing arrives.
    """

    source: RankMap
    target: RankMap
    itemsize: int
    wanted: Wanted = Wanted.EVERY
    stacked: bool = False
    filling: Filling | None = None
    _deliveries: dict[tuple[int, int], list[Delivery]] = field(default_factory=dict, repr=False)

    @property
    def rounds(self) -> int:  # type: ignore[override]
        """One, unless nothing crosses."""
        return 1 if self.moved else 0

    def describe(self, axes: tuple[str, ...]) -> str:  # noqa: ARG002 - ranks take part, not axes
        """One line for `str(plan)`."""
        what = "the terms" if self.stacked else "the missing elements"
        if not self.moved:
            return f"local: place {what.replace('missing ', '')} that each rank holds"
        senders, receivers = (int(np.count_nonzero(counts)) for counts in self.traffic())
        return f"{what} from {senders} to {receivers} ranks, in messages between pairs"

    # ----------------------------------------------------------------------------------------- counts

    @cached_property
    def counts(self) -> Counts:
        """How many elements each part of the source shares with each part of the target."""
        return shared_counts(
            [part.cell for part in self.source.parts], [part.cell for part in self.target.parts]
        )

    @cached_property
    def moved(self) -> int:  # type: ignore[override]
        """How many elements cross between ranks."""
        return sum(int(self._missing(part, term).sum()) for part, term in self._sources())

    def _missing(self, part: int, term: int) -> Counts:
        """How many elements of one term of a part must come to each part of the target from others."""
        times = self._takers.copy()
        held = {
            self.target.place_of[r]
            for r in self.source.parts[part].holders(term)
            if r in self.target.place_of
        }
        if self.wanted is Wanted.ONE:
            held = {place._replace(term=0) for place in held}
        elif self.wanted is Wanted.SAME:
            held = {place for place in held if place.term == term}
        for place in held:
            times[place.part] -= 1
        missing: Counts = self.counts[part] * times
        return missing

    @cached_property
    def _takers(self) -> Counts:
        """How often each part of the target is wanted: by every rank, or once per group."""
        every = self.wanted is Wanted.EVERY
        return np.array(
            [len(part.ranks if every else part.groups) for part in self.target.parts], dtype=np.int64
        )

    def traffic(self) -> tuple[Counts, Counts]:
        """Elements that each rank sends and receives."""
        return self._traffic

    @cached_property
    def _traffic(self) -> tuple[Counts, Counts]:
        sent = dict.fromkeys(self.source.ranks, 0)
        for part, term in self._sources():
            holders = self.source.parts[part].holders(term)
            if len(holders) == 1:
                sent[holders[0]] += int(self._missing(part, term).sum())
            for delivery in self.deliveries(part, term) if len(holders) > 1 else ():
                sent[delivery.sender] += self._amount(part, delivery)
        got = [self._received(rank) if rank in self.target.place_of else 0 for rank in self.source.ranks]
        return np.array(list(sent.values()), dtype=np.int64), np.array(got, dtype=np.int64)

    def _received(self, rank: int) -> int:
        """Elements that come to a rank."""
        goal, place = self.target.place_of[rank], self.source.place_of.get(rank)
        if self.wanted is Wanted.EVERY:
            total = self.source.terms * int(self.counts[:, goal.part].sum())
            return total if place is None else total - int(self.counts[place.part, goal.part])
        return sum(
            self._amount(part, want)
            for part, term in self._sources()
            for want in self._wants_in(part, term, goal.part)
            if want.receiver == rank
        )

    def holds(self, term: Counts, dtype: torch.dtype) -> Holds:  # noqa: ARG002 - as many of any
        """The result and the messages; where it is filled, before anything arrives, the identity.

        Where terms are made, the domain of the values is asked, which may take a truth value for each.
        """
        sent, got = self.traffic()
        buffers, wanted = sent + got, self.target.counts
        made = wanted * (self.source.terms if self.stacked else 1)
        beside = buffers
        if self.filling is not None:
            truths = 0 * wanted if self.stacked else -(-wanted // self.itemsize)
            beside = np.maximum.reduce([buffers, truths, 2 * np.minimum(wanted, 1)])
        return Holds(made + beside, made, wanted, buffers)

    def _amount(self, part: int, delivery: Delivery) -> int:
        whole = int(self.counts[part, delivery.target_part])
        if delivery.high - delivery.low == whole:
            return whole
        return sum(overlap.numel for overlap in self._overlaps(part, delivery))

    def _overlaps(self, part: int, delivery: Delivery) -> list[Overlap]:
        source, target = self.source.parts[part], self.target.parts[delivery.target_part]
        return cut_overlaps(overlaps(source.cell, target.cell), delivery.low, delivery.high)

    def _sources(self) -> list[tuple[int, int]]:
        return [(part, term) for part in range(len(self.source.parts)) for term in range(self.source.terms)]

    # ------------------------------------------------------------------------------------ who wants what

    def _wants(self, part: int, term: int) -> list[Delivery]:
        """What others want of one term of a part, in the order of their ranks; the senders are open."""
        wants = [
            want
            for index in np.flatnonzero(self.counts[part])
            for want in self._wants_in(part, term, int(index))
        ]
        return sorted(wants, key=lambda want: want.receiver)

    def _wants_in(self, part: int, term: int, target_part: int) -> list[Delivery]:
        """Those of them that are in one part of the target."""
        count = int(self.counts[part, target_part])
        holders = frozenset(self.source.parts[part].holders(term))
        receivers = self._receivers(self.target.parts[target_part], holders, term, count) if count else ()
        return [Delivery(-1, receiver, target_part, low, high) for receiver, low, high in receivers]

    def _receivers(
        self, target: Part, holders: frozenset[int], term: int, count: int
    ) -> Iterator[tuple[int, int, int]]:
        for group in target.groups:
            if self.wanted is Wanted.ONE:
                if holders.isdisjoint(group):
                    yield from self._spread(group, term, count)
                continue
            for rank in group if self.wanted is Wanted.EVERY else (group[term],):
                if rank not in holders:
                    yield rank, 0, count

    def _spread(self, group: tuple[int, ...], term: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Any rank of the group will do: all of them a share, or one the whole if that is small."""
        n = len(group)
        if count * self.itemsize < _CUT_BYTES:
            yield group[term % n], 0, count
            return
        for member, rank in enumerate(group):
            low, high = count * member // n, count * (member + 1) // n
            if low < high:
                yield rank, low, high

    def _keeps(self, rank: int, place: Place, target: Place) -> bool:
        """Whether a rank that holds elements and is named by the target puts its own in the result."""
        if self.wanted is Wanted.EVERY:
            return True
        if self.wanted is Wanted.SAME:
            return place.term == target.term
        holders = self.source.parts[place.part].holders(place.term)
        group = self.target.parts[target.part].groups[target.group]
        return next(member for member in group if member in holders) == rank

    # ------------------------------------------------------------------------------------ who sends it

    def deliveries(self, part: int, term: int) -> list[Delivery]:
        """All messages of one term of a part; each holder sends an equal share."""
        known = self._deliveries.get((part, term))
        if known is None:
            wants, holders = self._wants(part, term), self.source.parts[part].holders(term)
            known = self._deliveries[part, term] = list(self._shared_out(wants, holders))
        return known

    def _for(self, part: int, term: int, target_part: int) -> list[Delivery]:
        """Messages of one term of a part, those for one part of the target at least."""
        holders = self.source.parts[part].holders(term)
        if len(holders) > 1:
            return self.deliveries(part, term)
        return [want._replace(sender=holders[0]) for want in self._wants_in(part, term, target_part)]

    def _shared_out(self, wants: list[Delivery], holders: tuple[int, ...]) -> Iterator[Delivery]:
        total = sum(want.high - want.low for want in wants)
        position = 0
        for want in wants:
            size = want.high - want.low
            cuts = [min(max(total * i // len(holders) - position, 0), size) for i in range(len(holders))]
            cuts.append(size)
            if size * self.itemsize < _CUT_BYTES:
                cuts = [0 if 2 * cut < size or cut == 0 else size for cut in cuts]
                cuts[-1] = size
            for sender, low, high in zip(holders, cuts[:-1], cuts[1:], strict=True):
                if low < high:
                    yield want._replace(sender=sender, low=want.low + low, high=want.low + high)
            position += size

    # ----------------------------------------------------------------------------------- one rank's side

    def work(self, seat: Seat) -> Transfer:
        """What one rank keeps, sends and receives."""
        rank = cast("int", seat)
        place, goal = self.source.place_of.get(rank), self.target.place_of.get(rank)
        kept = self._kept(rank, place, goal)
        sends = self._sends(rank, place) if place is not None else {}
        receives = self._receives(rank, goal) if goal is not None else {}
        return Transfer(
            kept=kept if not receives else replace(kept, nothing=False),
            own=rank,
            shares=tuple(
                Share(peer, sends.get(peer, ()), receives.get(peer, ()), self._term(peer))
                for peer in sorted({*sends, *receives})
            ),
            terms=self.source.terms if self.stacked else 0,
            own_term=self._term(rank),
        )

    def _kept(self, rank: int, place: Place | None, goal: Place | None) -> Move:
        """What a rank puts into its result itself; nothing to do if that is all of it and is its source."""
        source, target = self.source.memory(rank), self.target.memory(rank)
        views: tuple[tuple[Strided, Strided], ...] = ()
        if place is not None and goal is not None and self._keeps(rank, place, goal):
            found = overlaps(self.source.parts[place.part].cell, self.target.parts[goal.part].cell)
            views = tuple(paired_views(found))
        same = source == target and all(a == b for a, b in views)
        whole = sum(a.numel for a, _ in views) == target.numel
        nothing = same and whole and self.filling is None and not self.stacked
        return Move(source, target, views, nothing, self.filling)

    def _sends(self, rank: int, place: Place) -> dict[int, tuple[Strided, ...]]:
        mine = [d for d in self.deliveries(place.part, place.term) if d.sender == rank]
        views = {d.receiver: tuple(source_views(self._overlaps(place.part, d))) for d in mine}
        return {peer: found for peer, found in views.items() if found}

    def _receives(self, rank: int, goal: Place) -> dict[int, tuple[Strided, ...]]:
        views: dict[int, tuple[Strided, ...]] = {}
        for part in np.flatnonzero(self.counts[:, goal.part]).tolist():
            for term in range(self.source.terms):
                for delivery in self._for(part, term, goal.part):
                    if delivery.receiver == rank:
                        views[delivery.sender] = tuple(target_views(self._overlaps(part, delivery)))
        return {peer: found for peer, found in views.items() if found}

    def _term(self, rank: int) -> int:
        """Which of the result's terms those of a rank are."""
        place = self.source.place_of.get(rank)
        return place.term if self.stacked and place is not None else 0
