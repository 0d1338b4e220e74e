"""The step in which ranks of one mesh send each other exactly what is missing; its messages and its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import cast

import numpy as np
import torch

from shardwright.index.overlap import paired_views, source_views, target_views
from shardwright.plan.cost import matching, over_all_ranks, shared_counts, without
from shardwright.plan.holders import Coords, Map
from shardwright.plan.lines import Ints
from shardwright.plan.peers import Overlaps, shared_with_peers
from shardwright.plan.step import Holds, Step
from shardwright.plan.work import Move, Seat, Share, Transfer


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
        return prod([self.source.sizes[axis] for axis in self.terms])

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
        return tuple(product(*(range(n) if axis in self.axes else (coords[axis],) for axis, n in sizes)))

    def work(self, seat: Seat) -> Transfer:
        """The messages of one rank, to itself included."""
        coords = cast("Coords", seat)
        shares: dict[Coords, Share] = {}
        own: Overlaps = ()
        members = self.members(coords)
        shared = shared_with_peers(self.source, self.target, self.axes, coords, members)
        for peer, (incoming, outgoing) in zip(members, shared, strict=True):
            to, of = tuple(source_views(outgoing)), tuple(target_views(incoming))
            shares[peer] = Share(peer, to, of, self._term(peer) if self.terms else 0)
            own = incoming if peer == coords else own
        if self.gather:
            whole = shares[coords].send
            shares = {peer: Share(peer, whole, share.receive) for peer, share in shares.items()}
        source, slot = self.source.memory(coords), self.target.memory(coords)
        return Transfer(
            kept=Move(source, slot, tuple(paired_views(own))),
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
