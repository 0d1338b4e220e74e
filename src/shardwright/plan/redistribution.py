"""From two layouts to a plan: a list of decisions, no search.

The near rule: a rank takes an element from the rank at the element's source coordinates, at its *own*
coordinate on replicated axes, and for a sum at every coordinate of the reduced axes. So what a rank holds
already has itself as sender, and an exchange crosses only the axes on which something changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending, Replicate
from shardwright.plan.cost import exchanged, lower_bound, matching
from shardwright.plan.grid import numel
from shardwright.plan.maps import LayoutMap, Map, MixedMap, every_coords, unchanged_axes
from shardwright.plan.pending import AxisPending, commute, pending_change
from shardwright.plan.plan import Plan
from shardwright.plan.steps import AllReduce, Combine, Embed, Exchange, LocalMove, Place, Step

# Below this many bytes per rank one round with more bytes beats two rounds with fewer (gloo and NCCL alike:
# a round costs tens of microseconds to milliseconds, these bytes a few microseconds).
ONE_ROUND_BYTES = 64 * 1024

Moves = tuple[list[Step], str]


def plan_redistribution(source: Layout, target: Layout, *, max_extra_bytes: int | None = None) -> Plan:
    """The plan that turns tensors of layout `source` into tensors of layout `target`.

    Args:
        source: what the tensor has.
        target: what it shall have; on the same mesh, with the same shape and dtype.
        max_extra_bytes: refuse a plan whose `peak_bytes` is larger.

    Raises:
        PlanError: the meshes, shapes or dtypes differ, a Pending of the target cannot be made, or the plan
            needs more memory than `max_extra_bytes`.
    """
    plan = _planned(source, target)
    if max_extra_bytes is not None and plan.peak_bytes > max_extra_bytes:
        raise PlanError(
            f"{source} -> {target} needs {plan.peak_bytes} B beside the source, more than the "
            f"{max_extra_bytes} B allowed; redistribute a part at a time"
        )
    return plan


@lru_cache(maxsize=4096)
def _planned(source: Layout, target: Layout) -> Plan:
    _check(source, target)
    if source == target:
        return Plan(source, target, (), "nothing changes", 0)
    return _Decision(source, target).plan()


def _check(source: Layout, target: Layout) -> None:
    for name, mine, theirs in (
        ("shape", source.shape, target.shape),
        ("dtype", source.dtype, target.dtype),
        ("mesh", source.mesh_shape, target.mesh_shape),
    ):
        if mine != theirs:
            raise PlanError(
                f"cannot redistribute {source} to {target}: {name} is {mine} here and {theirs} there"
            )


class _Decision:
    """The facts about one pair of layouts, and the decisions that follow from them."""

    def __init__(self, source: Layout, target: Layout) -> None:
        self.source, self.target, self.sizes = source, target, source.sizes
        self.change = pending_change(source, target)
        self.reduced = tuple(axis for axis, _ in self.change.reduced)
        self.before, self.after = LayoutMap(source), LayoutMap(target)
        self.padded = self._padded()
        self.arrival = self._arrival()

    def plan(self) -> Plan:
        kept = tuple(axis for axis, _ in self.change.kept)
        bound = lower_bound(self.before, self.arrival, self.source.numel, self.reduced, kept)
        steps, reason = self._reductions(bound) if self.reduced else self._moves()
        return Plan(self.source, self.target, (*steps, *self._finish()), reason, bound * self.source.itemsize)

    # ------------------------------------------------------------------ Pendings that the target asks for

    def _padded(self) -> tuple[AxisPending, ...]:
        """Pendings that are made by padding the part that a rank has, instead of fetching the rest.

        Padding for one and embedding for another is right only if they commute.
        """
        made = self.change.made
        if not commute(made):
            return ()
        parted = self.before.cut.union(axis for axis in self.reduced if self.sizes[axis] > 1)
        return tuple(
            (axis, pending) for axis, pending in made if axis in parted and self._has_identity(pending)
        )

    def _has_identity(self, pending: Pending) -> bool:
        return pending.identity(torch.empty((), dtype=self.source.dtype)) is not None

    def _arrival(self) -> Map:
        """Where each element goes before Pendings are made of it."""
        axes = frozenset(axis for axis, _ in self.padded)
        if not axes:
            return self.after
        return MixedMap(
            self.before, self.after, axes & self.before.cut, tuple(sorted(axes - self.before.cut))
        )

    def _finish(self) -> list[Step]:
        steps: list[Step] = []
        if self.padded:
            steps.append(Place(self.arrival, self.after, self.padded))
        embedded = tuple(item for item in self.change.made if item not in self.padded)
        if embedded:
            steps.append(Embed(embedded))
        return steps

    # ------------------------------------------------------------------------------ elements that move

    def _moves(self) -> Moves:
        exchange = _exchange(self.before, self.arrival)
        if self.source.numel == 0 or exchanged(exchange) == 0:
            return [LocalMove(self.before, self.arrival)], "every rank holds what it needs"
        if not self._is_even_gather(exchange):
            return [exchange], "each rank receives exactly what it misses"
        return [
            replace(exchange, gather=True)
        ], "every rank needs all parts of one axis, which are equal in size"

    def _is_even_gather(self, exchange: Exchange) -> bool:
        # Without an axis that only the target cuts, M = E says that every rank's part is wanted by its peers.
        if len(exchange.axes) != 1 or not self.arrival.cut <= self.before.cut:
            return False
        if matching(self.before, self.arrival) != self.source.numel:
            return False
        sizes = tuple(size if axis in self.before.cut else 1 for axis, size in enumerate(self.sizes))
        return len({numel(self.before.cell(coords)) for coords in every_coords(sizes)}) == 1

    # -------------------------------------------------------------------------- terms that are combined

    def _reductions(self, bound: int) -> Moves:
        combine = Combine(self.change.reduced)
        direct = _exchange(self.before, self.arrival, self.reduced)
        if self.source.numel == 0:
            return [LocalMove(self.before, self.arrival)], "there are no elements"
        moved = exchanged(direct)
        if moved <= bound:
            return [
                direct,
                combine,
            ], "each rank receives the terms of its part and combines them in rank order"
        if moved * self.source.itemsize <= ONE_ROUND_BYTES * prod(self.sizes):
            return [direct, combine], "the terms are small: one round with more bytes than the bound"
        native = self._native()
        if native is not None:
            return [native], "the backend's all-reduce"
        if isinstance(self.arrival, MixedMap):
            return [direct, combine], "one round: the parts of the new pending axis come from all terms"
        return self._two_rounds(self.arrival, combine)

    def _native(self) -> AllReduce | None:
        """The all-reduce that does it all, if there is one."""
        if len(self.change.reduced) != 1 or self.change.made:
            return None
        axis, pending = self.change.reduced[0]
        finished = self.source.with_placements({self.source.axes[axis]: Replicate()})
        if finished != self.target or not _reduces_natively(pending, self.source.dtype):
            return None
        return AllReduce(self.before, axis, pending.reduce_op)

    def _two_rounds(self, arrival: LayoutMap, combine: Combine) -> Moves:
        kept = {axis for axis, _ in self.change.kept}
        free = [axis for axis in range(len(self.sizes)) if axis not in self.before.cut | arrival.cut | kept]
        middle = MixedMap(self.before, arrival, self.before.cut - arrival.cut, tuple(free))
        steps: list[Step] = [
            _exchange(self.before, middle, self.reduced), combine, _exchange(middle, arrival),
        ]  # fmt: skip
        return steps, "two rounds: the terms are combined in even parts, then the parts are gathered"


def _reduces_natively(pending: Pending, dtype: torch.dtype) -> bool:
    if pending.reduce_op in ("sum", "avg", "product"):
        return True
    # gloo's max and min drop NaN.
    return pending.reduce_op in ("max", "min") and not dtype.is_floating_point


def _exchange(source: Map, target: Map, reduced: Iterable[int] = ()) -> Exchange:
    """The exchange by the near rule, over the axes on which something changes."""
    crossed = source.cut - unchanged_axes(source, target)
    terms = tuple(reduced)
    sizes = source.sizes
    return Exchange(
        source, target, tuple(sorted(crossed.union(axis for axis in terms if sizes[axis] > 1))), terms
    )
