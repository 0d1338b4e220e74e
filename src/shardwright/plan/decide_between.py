"""From a layout on one mesh to a layout on another: disjoint meshes, overlapping ones, the same ranks anew.

What a rank holds counts whatever the mesh; each rank receives only what it wants and does not hold. Without
terms one round does it with the fewest bytes. Terms are combined at one home per element, and the value goes
on from there; where one rank wants it, that rank is the home, and one round is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardwright.index.region import Box
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending
from shardwright.placement.partial import Partial
from shardwright.plan.bound_between import least
from shardwright.plan.carry import Carry, Wanted
from shardwright.plan.pending import commute, has_embed, pendings_of, refuse_target, takes_padding
from shardwright.plan.plan import Plan
from shardwright.plan.rank_map import RankMap, homes, rank_map, slab_of
from shardwright.plan.step import Step
from shardwright.plan.steps import Combine, Embed, Pieces, filling_of
from shardwright.plan.work import Filling, TermsOf

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

    steps: tuple[Step, ...]
    reason: str
    finished: bool = True

    @property
    def moved(self) -> int:
        """How many elements cross between ranks."""
        return sum(step.moved for step in self.steps)


class DecisionBetween:
    """The facts about layouts on two meshes, and the decisions that follow from them.

    Raises: PlanError: a Pending of the target cannot be made.
    """

    most_pieces = 256  # more would cost more time than the memory is worth

    def __init__(self, source: Layout, target: Layout) -> None:
        self.source, self.target = source, target
        everybody = tuple(sorted({*source.ranks, *target.ranks}))
        self.before, self.after = rank_map(source, everybody), rank_map(target, everybody)
        self.terms, self.made = pendings_of(source), pendings_of(target)
        self.same_terms = bool(self.terms) and _kinds(self.terms) == _kinds(self.made)
        self.makes = all(has_embed(of.pending) for of in self.made)
        if not self.same_terms:
            self._check_made()
        self.padded = self.makes and self._can_be_padded()
        self.merged = self._merged()

    def plan(self) -> Plan:
        """All elements at once."""
        choice = min(self._choices(self.after), key=lambda choice: choice.moved)  # of equal ones the first
        return self._plan(choice.steps, choice.reason, finished=choice.finished)

    def plan_in_pieces(self, count: int) -> Plan:
        """One slab of the longest dim after the other: smaller messages, the same bytes in all."""
        slabs = tuple(slab_of(self.after, slab) for slab in _slabs_of(self.source.shape, count))
        choices, whole = self._best(slabs)
        every = range(len(slabs))
        pieces = Pieces(whole.steps, len(slabs), lambda i: (choices[i].steps, slabs[i]), self.after, every)
        reason = f"in {len(slabs)} pieces to save memory: {choices[0].reason}"
        return self._plan((pieces,), reason, finished=choices[0].finished)

    def _plan(self, steps: tuple[Step, ...], reason: str, *, finished: bool) -> Plan:
        embeds = bool(self.made) and finished and not self.padded
        last = (Embed(self.made, self.after),) if embeds else ()
        by_term = self.same_terms or self.merged is not None
        bound = least(self.before, self.after, padded=self.padded, by_term=by_term)
        return Plan(self.source, self.target, (*steps, *last), reason, bound * self.source.itemsize)

    # ------------------------------------------------------------------------------------- decisions

    def _best(self, arrivals: Sequence[RankMap]) -> tuple[list[Choice], Choice]:
        """For every slab, and the whole, the choice that moves least; ties go to the first, the simplest."""
        of_slabs = [self._choices(arrival) for arrival in arrivals]
        totals = [sum(choice.moved for choice in alike) for alike in zip(*of_slabs, strict=True)]
        best = totals.index(min(totals))
        return [choices[best] for choices in of_slabs], self._choices(self.after)[best]

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
            filled = Filling(self.merged)
            joined = self._carry(self.before, arrival, Wanted.ONE, stacked=True, filling=filled)
            fold = Combine((TermsOf(0, self.merged, self.before.terms),))
            choices.append(Choice((joined, fold), _MERGE, finished=False))
        return choices + self._reductions(arrival) if self.makes else choices

    def _reductions(self, arrival: RankMap) -> list[Choice]:
        """Finish the value, then bring it to the target."""
        home = homes(self.before, arrival)
        gather = self._carry(self.before, home, Wanted.EVERY, stacked=True)
        two = Choice((gather, Combine(self.terms), self._last(home, arrival)), _HOMES)
        if self.padded:
            return [two]
        direct = self._carry(self.before, arrival, Wanted.EVERY, stacked=True)
        return [Choice((direct, Combine(self.terms)), _TERMS), two]

    def _last(self, source: RankMap, arrival: RankMap) -> Carry:
        """Finished values to where they belong."""
        if not self.padded:
            return self._carry(source, arrival, Wanted.EVERY)
        return self._carry(source, arrival, Wanted.ONE, filling=filling_of(self.made))

    def _carry(
        self,
        source: RankMap,
        target: RankMap,
        wanted: Wanted,
        *,
        stacked: bool = False,
        filling: Filling | None = None,
    ) -> Carry:
        return Carry(source, target, self.source.itemsize, wanted, stacked, filling)

    # ------------------------------------------------------------------- Pendings that the target asks for

    def _check_made(self) -> None:
        for axis in self.target.pending_axes:
            refuse_target(self.target, axis)

    def _can_be_padded(self) -> bool:
        """Whether the target's terms can be made from a value that one rank of each group has."""
        if not self.made or not commute(self.made):
            return False
        return all(takes_padding(of.pending, self.source.dtype, of.n) for of in self.made)

    def _merged(self) -> Pending | None:
        """The reduction that joins terms of the source to terms of the target, if there is one."""
        every = {of.pending for of in (*self.terms, *self.made)}
        if not self.terms or not self.padded or len(every) != 1:
            return None
        (pending,) = every
        if pending.reduce_op == "avg":
            same = prod(of.n for of in self.terms) == prod(of.n for of in self.made)
            return Partial("sum") if same else None
        return pending if pending.reduce_op else None


def _kinds(pendings: Sequence[TermsOf]) -> list[tuple[Pending, int]]:
    return [(of.pending, of.n) for of in pendings]


# ---------------------------------------------------------------------- in pieces


def _slabs_of(shape: tuple[int, ...], count: int) -> list[Box]:
    """The tensor cut into `count` even slabs along its longest dim, or one for each index."""
    if not shape:
        return [Box((), ())]
    dim = shape.index(max(shape))
    count = min(count, max(shape[dim], 1))
    slabs = []
    for i in range(count):
        low, high = shape[dim] * i // count, shape[dim] * (i + 1) // count
        offset = tuple(low if d == dim else 0 for d in range(len(shape)))
        slabs.append(Box(offset, (*shape[:dim], high - low, *shape[dim + 1 :])))
    return slabs
