"""From two layouts to a plan: a list of decisions, no search.

The near rule: a rank takes an element from the rank at the element's source coordinates, at its *own*
coordinate on replicated axes, and for a sum at every coordinate of the reduced axes. So what a rank holds
already has itself as sender, and an exchange crosses only the axes on which something changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch

from shardwright.errors import PlanError
from shardwright.index.region import Shape
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending, Replicate
from shardwright.placement.partial import Partial
from shardwright.plan import network
from shardwright.plan.cost import lower_bound, matching
from shardwright.plan.decide_between import DecisionBetween
from shardwright.plan.exchange import Exchange
from shardwright.plan.holders import LayoutMap, Map, MixedMap, SlabMap, unchanged_axes
from shardwright.plan.lines import groups_of
from shardwright.plan.pending import commute, pending_change, takes_padding
from shardwright.plan.plan import Plan
from shardwright.plan.slow_axes import by_level, slow_bound
from shardwright.plan.step import Step
from shardwright.plan.steps import AllReduce, Combine, Embed, LocalMove, Pieces, Place
from shardwright.plan.work import TermsOf
from shardwright.remember import remembered

# Below this many bytes per rank one round with more bytes beats two rounds with fewer (gloo and NCCL alike:
# a round costs tens of microseconds to milliseconds, these bytes a few microseconds).
ONE_ROUND_BYTES = 64 * 1024

Moves = tuple[list[Step], str]

_LEVELS = "slow axes are gathered first and reduced last, so that less crosses them"


def one_round_bytes() -> int:
    """How many bytes per rank are few."""
    stated = network.current.one_round_bytes
    return ONE_ROUND_BYTES if stated is None else stated


def is_slow(axis: str) -> bool:
    """Is what is sent along an axis worth to be hidden behind what is computed? It was stated so."""
    return axis in network.current.slow_axes


_LOCAL = "every rank holds what it needs"
_DIRECT = "each rank receives exactly what it misses"
_GATHER = "every rank needs all parts of one axis, which are equal in size"
_TERMS = "each rank receives the terms of its part and combines them in rank order"
_SMALL = "the terms are small: one round, with more bytes than the least"
_NATIVE = "the backend's all-reduce"
_TWO_ROUNDS = "two rounds: the terms are combined in even parts, then the parts are gathered"


def plan_redistribution(source: Layout, target: Layout, *, max_extra_bytes: int | None = None) -> Plan:
    """The plan that turns tensors of layout `source` into tensors of layout `target`.

    Args:
        source: what the tensor has.
        target: what it shall have, with the same shape and dtype; on the same mesh or on another one.
        max_extra_bytes: the most that `peak_bytes` may be; a plan that needs more is run in pieces.

    Raises:
        PlanError: no layouts, the shapes or dtypes differ, a Pending of the target cannot be made, or
            even the smallest pieces need more memory than `max_extra_bytes`.
    """
    for kind in (type(source), type(target)):
        if not issubclass(kind, Layout):
            raise PlanError(f"plan_redistribution takes two layouts, got a {kind.__name__}: sw.layout_of(x)")
    if max_extra_bytes is not None and (type(max_extra_bytes) is not int or max_extra_bytes < 0):
        raise PlanError(f"max_extra_bytes={max_extra_bytes!r:.60} is no number of bytes; give one, or None")
    plan = _planned(source, target, network.version)
    if max_extra_bytes is None or plan.peak_bytes <= max_extra_bytes:
        return plan
    return _planned_in_pieces(source, target, max_extra_bytes, network.version)


def plan_as_asked(source: Layout, target: Layout, *, in_one_round: bool | None) -> Plan:
    """As `plan_redistribution`, with terms in one round, in two, or (None) as their size asks for."""
    return _planned(source, target, network.version, in_one_round)


def plan_together(pairs: Iterable[tuple[Layout, Layout]]) -> list[Plan]:
    """The plans of tensors that will share collectives.

    Terms that are small alone may be large together: those of one dtype then go in two rounds of fewer bytes.
    """
    plans = [_planned(*pair, network.version) for pair in pairs]
    small: dict[torch.dtype, list[int]] = {}
    for index, plan in enumerate(plans):
        if plan.reason == _SMALL:
            small.setdefault(plan.source.dtype, []).append(index)
    for members in small.values():
        ranks = len(plans[members[0]].source.ranks)
        if sum(plans[i].total_bytes for i in members) > one_round_bytes() * ranks:
            for i in members:
                plans[i] = _planned(plans[i].source, plans[i].target, network.version, False)
    return plans


@remembered(4096)
def _planned(
    source: Layout,
    target: Layout,
    version: int,  # noqa: ARG001 - of the network: a part of the key
    in_one_round: bool | None = None,
) -> Plan:
    _check(source, target)
    if source == target:
        return Plan(source, target, (), "nothing changes", 0)
    if source.mesh_shape != target.mesh_shape:
        return DecisionBetween(source, target).plan()
    return _Decision(source, target).plan(in_one_round)


@remembered(1024)
def _planned_in_pieces(source: Layout, target: Layout, max_extra_bytes: int, version: int) -> Plan:
    one_mesh = source.mesh_shape == target.mesh_shape
    decision = _Decision(source, target) if one_mesh else DecisionBetween(source, target)
    least = _planned(source, target, version).peak_bytes
    for count in _piece_counts(source.shape, decision.most_pieces):
        plan = decision.plan_in_pieces(count)
        if plan.peak_bytes <= max_extra_bytes:
            return plan
        least = min(least, plan.peak_bytes)
    result = int(decision.after.counts.max()) * source.itemsize
    raise PlanError(
        f"{source} -> {target} cannot be done with {max_extra_bytes} B beside the source: even in {count} "
        f"pieces it takes {least} B (the result alone is {result} B); pass max_extra_bytes={least} or more"
    )


def _piece_counts(shape: Shape, most: int) -> list[int]:
    """In how many pieces it may be cut, ascending."""
    longest = max((*shape, 2))
    counts = [2**i for i in range(1, longest.bit_length()) if 2**i < longest] + [longest]
    return [count for count in counts if count <= most]


def _check(source: Layout, target: Layout) -> None:
    for name, mine, theirs in (("shape", source.shape, target.shape), ("dtype", source.dtype, target.dtype)):
        if mine != theirs:
            raise PlanError(
                f"cannot redistribute {source} to {target}: {name} is {mine} here and {theirs} there; "
                "reshape or convert the tensor first"
            )


class _Decision:
    """The facts about one pair of layouts, and the decisions that follow from them."""

    most_pieces = 1024  # more would cost more time than the memory is worth

    def __init__(self, source: Layout, target: Layout) -> None:
        self.source, self.target, self.sizes = source, target, source.sizes
        self.change = pending_change(source, target)
        self.reduced = tuple([of.axis for of in self.change.reduced])
        self.kept = tuple([of.axis for of in self.change.kept])
        groups = groups_of((source, target))
        self.before, self.after = LayoutMap(source, groups), LayoutMap(target, groups)
        stated = network.current.slow_axes
        self.slow = _slow_axes(source, stated) if stated else frozenset()
        self.padded = self._padded()
        self.arrival = self._arrival()

    def plan(self, in_one_round: bool | None = None) -> Plan:
        """All elements at once; terms in one round, in two, or (None) as their size asks for."""
        steps, reason = self._moves(self.arrival, self._native(), in_one_round=in_one_round)
        return self._plan((*steps, *self._finish()), reason)

    def plan_in_pieces(self, count: int) -> Plan:
        """One equal part of every message after the other: the same bytes, smaller buffers."""
        whole, reason = self._moves(self.arrival, None)
        in_one_round = reason == _SMALL

        def part(index: int) -> tuple[tuple[Step, ...], SlabMap]:
            slab = SlabMap(self.before, self.arrival, count, index)
            return tuple(self._moves(slab, None, in_one_round=in_one_round)[0]), slab

        # No rank has more in another part than in the last.
        pieces = Pieces(tuple(whole), count, part, self.arrival, larger=(count - 1,))
        return self._plan((pieces, *self._finish()), f"in {count} pieces to save memory: {reason}")

    def _plan(self, steps: tuple[Step, ...], reason: str) -> Plan:
        size = self.source.itemsize
        bound = self._bound(self.arrival) * size
        if not self.slow:
            return Plan(self.source, self.target, steps, reason, bound)
        least = slow_bound(self.before, self.arrival, self.reduced, self.kept, self.slow) * size
        return Plan(self.source, self.target, steps, reason, bound, self.slow, least)

    def _bound(self, arrival: Map) -> int:
        return lower_bound(self.before, arrival, self.reduced, self.kept)

    # ------------------------------------------------------------------ Pendings that the target asks for

    def _padded(self) -> tuple[TermsOf, ...]:
        """Pendings that are made by padding the part that a rank has, instead of fetching the rest.

        Only one coordinate of such an axis needs an element. Where every rank has all that it wants, an embed
        is simpler. Padding for one and embedding for another is right only if they commute.
        """
        made = self.change.made
        if not made or not commute(made) or not self._bound(self.after):  # the bound is the dearest to know
            return ()
        return tuple([of for of in made if takes_padding(of.pending, self.source.dtype, of.n)])

    def _arrival(self) -> LayoutMap | MixedMap:
        """Where each element goes before Pendings are made of it."""
        if not self.padded:
            return self.after
        axes, cut = frozenset([of.axis for of in self.padded]), self.before.cut
        return MixedMap(self.before, self.after, axes & cut, tuple(sorted(axes - cut)))

    def _finish(self) -> list[Step]:
        steps: list[Step] = []
        if self.padded:
            steps.append(Place(self.arrival, self.after, self.padded))
        embedded = self.change.made
        if self.padded:
            embedded = tuple([of for of in embedded if of not in self.padded])
        if embedded:
            steps.append(Embed(embedded, self.after))
        return steps

    # ------------------------------------------------------------------------------ elements that move

    def _moves(self, arrival: Map, native: AllReduce | None, *, in_one_round: bool | None = None) -> Moves:
        """The steps that bring the elements of `arrival` there; None: in one round where that is cheap."""
        steps, reason = self._flat_moves(arrival, native, in_one_round)
        if not self.slow or reason == _SMALL:
            return steps, reason
        levels = by_level(steps, self.slow, _exchange, self.change.reduced)
        return levels, reason if len(levels) == len(steps) else f"{reason}; {_LEVELS}"

    def _flat_moves(self, arrival: Map, native: AllReduce | None, in_one_round: bool | None) -> Moves:
        if self.reduced and arrival.elements and not self._has_one_term():
            return self._reductions(arrival, native, in_one_round)
        exchange = _exchange(self.before, arrival)
        gather = self._is_even_gather(exchange)
        if gather:
            exchange = replace(exchange, gather=True)
        if arrival.elements == 0 or exchange.moved == 0:
            return [LocalMove(self.before, arrival)], _LOCAL
        return [exchange], _GATHER if gather else _DIRECT

    def _has_one_term(self) -> bool:
        """Is what is pending finished as it is: on axes of one rank, by a reduction that leaves one term?"""
        return all(of.n == 1 and type(of.pending) is Partial for of in self.change.reduced)

    def _is_even_gather(self, exchange: Exchange) -> bool:
        # Without an axis that only the target cuts, M = E says that every rank's part is wanted by its peers.
        if len(exchange.axes) != 1 or not exchange.target.cut <= self.before.cut:
            return False
        if matching(self.before, exchange.target) != self.source.numel:
            return False
        return self.before.is_even

    # -------------------------------------------------------------------------- terms that are combined

    def _reductions(self, arrival: Map, native: AllReduce | None, in_one_round: bool | None) -> Moves:
        combine = Combine(self.change.reduced)
        direct = _exchange(self.before, arrival, self.reduced)
        moved, bound = direct.moved, self._bound(arrival)
        if in_one_round is None:
            in_one_round = moved * self.source.itemsize <= one_round_bytes() * prod(self.sizes)
        if native is not None and not in_one_round:
            # Also where one exchange moves as little (two terms): it needs a buffer for the other's term.
            more = native.moved / bound
            return [native], _NATIVE if more == 1 else f"{_NATIVE}, with {more:.2f} times the fewest bytes"
        if moved <= bound:
            return [direct, combine], _TERMS
        if in_one_round:
            return [direct, combine], _SMALL
        return self._two_rounds(arrival, combine), _TWO_ROUNDS

    def _native(self) -> AllReduce | None:
        """The all-reduce that does it all, if there is one."""
        if len(self.change.reduced) != 1 or self.change.made:
            return None
        axis, pending, _ = self.change.reduced[0]
        finished = self.source.with_placements({self.source.axes[axis]: Replicate()})
        if finished != self.target or not _reduces_natively(pending, self.source.dtype):
            return None
        return AllReduce(self.before, axis, pending.reduce_op)

    def _two_rounds(self, arrival: Map, combine: Combine) -> list[Step]:
        taken = self.before.cut | arrival.cut | frozenset(self.kept)
        free = tuple(axis for axis in range(len(self.sizes)) if axis not in taken)
        middle = MixedMap(self.before, arrival, self.before.cut - arrival.cut, free)
        return [_exchange(self.before, middle, self.reduced), combine, _exchange(middle, arrival)]


def _slow_axes(layout: Layout, stated: tuple[str, ...]) -> frozenset[int]:
    named = enumerate(zip(layout.axes, layout.sizes, strict=True))
    return frozenset([axis for axis, (name, n) in named if name in stated and n > 1])


def _reduces_natively(pending: Pending, dtype: torch.dtype) -> bool:
    if pending.reduce_op in ("sum", "avg"):
        return True
    if pending.reduce_op == "product":
        return not dtype.is_complex  # complex numbers travel as pairs, which add up and do not multiply
    # The backends' max and min drop NaN.
    return pending.reduce_op in ("max", "min") and not dtype.is_floating_point


def _exchange(source: Map, target: Map, reduced: Iterable[int] = ()) -> Exchange:
    """The exchange by the near rule, over the axes on which something changes."""
    terms = tuple(reduced)
    crossed = source.cut - unchanged_axes(source, target)
    if terms:
        crossed = crossed.union([axis for axis in terms if source.sizes[axis] > 1])
    return Exchange(source, target, tuple(sorted(crossed)), terms)
