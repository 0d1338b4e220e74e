"""From a layout on one mesh to a layout on another: disjoint meshes, overlapping ones, the same ranks anew.

What a rank holds counts whatever the mesh; each rank receives only what it wants and does not hold. Without
terms one round does it with the fewest bytes. Terms are combined at one home per element, and the value goes
on from there; where one rank wants it, that rank is the home, and one round is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import cast

from shardwright.errors import PlanError
from shardwright.index.slabs import slab_counts, slabs_of
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending
from shardwright.placement.partial import Partial
from shardwright.plan.bound_between import least
from shardwright.plan.carry import Carry, Wanted
from shardwright.plan.pending import commute, has_embed, refuse_target, takes_padding
from shardwright.plan.plan_between import PlanBetween
from shardwright.plan.rank_map import RankMap, homes, rank_map, slab_of
from shardwright.plan.steps_between import Finish, InSlab, Sized, Slabs, Term

_LOCAL = "every rank holds what it needs"
_DIRECT = "each rank receives exactly what it misses"
_PAD = "one rank of each group that will be reduced receives what the group misses"
_SAME = "each term goes to the rank at its place"
_MERGE = "terms stay where they are wanted, the others join them"
_TERMS = "each rank receives the terms of its part and combines them in rank order"
_HOMES = "two rounds: the terms are combined at one rank per element, the values go on from there"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to bring everything to the target. finished: it ends in values, of which terms may be made."""

    steps: tuple[InSlab, ...]
    reason: str
    finished: bool = True

    @property
    def moved(self) -> int:
        """How many elements cross between ranks."""
        return sum(step.moved for step in self.steps if isinstance(step, Carry))


@lru_cache(maxsize=4096)
def plan_between(source: Layout, target: Layout) -> PlanBetween:
    """The plan between two meshes; see `plan_redistribution`.

    Raises: PlanError: a Pending of the target cannot be made.
    """
    return _Decision(source, target).plan()


@lru_cache(maxsize=1024)
def plan_between_in_pieces(source: Layout, target: Layout, max_extra_bytes: int) -> PlanBetween:
    """The plan in so many pieces that no rank holds more than this beside its source.

    Raises: PlanError: even the smallest pieces need more.
    """
    decision = _Decision(source, target)
    for count in slab_counts(source.shape):
        plan = decision.plan_in_pieces(count)
        if plan.peak_bytes <= max_extra_bytes:
            return plan
    raise PlanError(
        f"{source} -> {target} cannot be done with {max_extra_bytes} B beside the source: in {count} pieces, "
        f"the most that it can be cut in, it needs {plan.peak_bytes} B; pass "
        f"max_extra_bytes={plan.peak_bytes} or more"
    )


class _Decision:
    """The facts about one pair of layouts, and the decisions that follow from them."""

    def __init__(self, source: Layout, target: Layout) -> None:
        self.source, self.target = source, target
        self.before, self.after = rank_map(source), rank_map(target)
        self.terms, self.made = _pendings(source), _pendings(target)
        self.same_terms = bool(self.terms) and self.terms == self.made
        self.makes = all(has_embed(pending) for pending, _ in self.made)
        if not self.same_terms:
            self._check_made()
        self.padded = self.makes and self._can_be_padded()
        self.merged = self._merged()

    def plan(self) -> PlanBetween:
        """All elements at once."""
        choice = self._best([self.after])[0]
        return self._plan(choice.steps, choice.reason, finished=choice.finished)

    def plan_in_pieces(self, count: int) -> PlanBetween:
        """One slab of the longest dim after the other: smaller messages, the same bytes in all."""
        slabs = tuple(slab_of(self.after, slab) for slab in slabs_of(self.source.shape, count))
        choices = self._best(slabs)
        pieces = Slabs(tuple(choice.steps for choice in choices), slabs, self.after)
        reason = f"in {len(slabs)} pieces to save memory: {choices[0].reason}"
        return self._plan((pieces,), reason, finished=choices[0].finished)

    def _plan(self, steps: tuple[InSlab | Slabs, ...], reason: str, *, finished: bool) -> PlanBetween:
        embeds = bool(self.made) and finished and not self.padded
        last = (Term(self.made, self.after),) if embeds else ()
        by_term = self.same_terms or self.merged is not None
        bound = least(self.before, self.after, padded=self.padded, by_term=by_term)
        return PlanBetween(self.source, self.target, (*steps, *last), reason, bound * self.source.itemsize)

    # ------------------------------------------------------------------------------------- decisions

    def _best(self, arrivals: Sequence[RankMap]) -> list[Choice]:
        """For every slab the same choice, that which moves least; ties go to the first, which is simplest."""
        of_slabs = [self._choices(arrival) for arrival in arrivals]
        totals = [sum(choice.moved for choice in alike) for alike in zip(*of_slabs, strict=True)]
        best = totals.index(min(totals))
        return [choices[best] for choices in of_slabs]

    def _choices(self, arrival: RankMap) -> list[Choice]:
        if not self.terms:
            carry = self._last(self.before, arrival)
            direct = _PAD if self.padded else _DIRECT
            return [Choice((carry,), direct if carry.moved else _LOCAL)]
        choices: list[Choice] = []
        if self.same_terms:
            step = self._carry(self.before, arrival, Wanted.SAME)
            choices.append(Choice((step,), _SAME, finished=False))
        if self.merged is not None:
            joined = self._carry(self.before, arrival, Wanted.ONE, stacked=True, fill=self.merged)
            fold = Finish(((self.merged, self.before.terms),), arrival)
            choices.append(Choice((joined, fold), _MERGE, finished=False))
        return choices + self._reductions(arrival) if self.makes else choices

    def _reductions(self, arrival: RankMap) -> list[Choice]:
        """Finish the value, then bring it to the target."""
        home = homes(self.before, arrival)
        gather = self._carry(self.before, home, Wanted.EVERY, stacked=True)
        two = Choice((gather, Finish(self.terms, home), self._last(home, arrival)), _HOMES)
        if self.padded:
            return [two]
        direct = self._carry(self.before, arrival, Wanted.EVERY, stacked=True)
        return [Choice((direct, Finish(self.terms, arrival)), _TERMS), two]

    def _last(self, source: RankMap, arrival: RankMap) -> Carry:
        """Finished values to where they belong."""
        if not self.padded:
            return self._carry(source, arrival, Wanted.EVERY)
        # An average divides by the size of its axis, whatever the other ranks hold.
        scale = prod(n for pending, n in self.made if pending.reduce_op == "avg")
        return self._carry(source, arrival, Wanted.ONE, fill=self.made[0][0], scale=scale)

    def _carry(
        self,
        source: RankMap,
        target: RankMap,
        wanted: Wanted,
        *,
        stacked: bool = False,
        fill: Pending | None = None,
        scale: int = 1,
    ) -> Carry:
        return Carry(source, target, self.source.itemsize, wanted, stacked, fill, scale)

    # ------------------------------------------------------------------- Pendings that the target asks for

    def _check_made(self) -> None:
        for axis in self.target.pending_axes:
            refuse_target(self.target, axis)

    def _can_be_padded(self) -> bool:
        """Whether the target's terms can be made from a value that one rank of each group has."""
        if not self.made or not commute(tuple((axis, p) for axis, (p, _) in enumerate(self.made))):
            return False
        return all(takes_padding(pending, self.source.dtype) for pending, _ in self.made)

    def _merged(self) -> Pending | None:
        """The reduction that joins terms of the source to terms of the target, if there is one."""
        every = {pending for pending, _ in (*self.terms, *self.made)}
        if not self.terms or not self.padded or len(every) != 1:
            return None
        (pending,) = every
        if pending.reduce_op == "avg":
            same = prod(n for _, n in self.terms) == prod(n for _, n in self.made)
            return Partial("sum") if same else None
        return pending if pending.reduce_op else None


def _pendings(layout: Layout) -> tuple[Sized, ...]:
    """The Pendings in their order of application, with the sizes of their axes."""
    return tuple(
        (cast("Pending", layout.placements[axis]), layout.sizes[axis])
        for axis in layout.order
        if layout.placements[axis].is_pending
    )
