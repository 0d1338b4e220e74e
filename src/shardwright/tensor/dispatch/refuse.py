"""What `explicit()` refuses of a prepared call, in words that teach."""

from __future__ import annotations

from shardwright.errors import ImplicitRedistributionError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.plan.decide import plan_redistribution
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.refusal import implicit_text
from shardwright.tensor import explicit_mode
from shardwright.tensor.dispatch.metadata import described_call
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dtensor import DTensor


def refuse_implicit(func: Op, args: Args, kwargs: Kwargs, prepared: Prepared, tensors: list[DTensor]) -> None:
    """Raise for a call that would communicate implicitly while `explicit()` is active.

    A move that costs nothing (taking a slice of what the rank holds, embedding a finished value) is no
    communication and passes.
    """
    if not explicit_mode.here.explicit:
        return
    layouts = [t._spec.shown.layout for t in tensors]
    wanted = list(layouts)
    for move in prepared.moves:
        wanted[move.operand] = move.target
    sent = sum(plan_redistribution(layouts[m.operand], m.target).total_bytes for m in prepared.moves)
    for back in prepared.brought_back:
        sent += plan_redistribution(back.held, layouts[back.operand]).total_bytes
        if back.held.pending_axes:  # it would be finished on its way back: finished first, it stays as it is
            wanted[back.operand] = _finished(layouts[back.operand])
    if sent:
        call = described_call(func, args, kwargs)
        raise ImplicitRedistributionError(implicit_text(call, layouts, wanted, prepared.reason))


def _finished(layout: Layout) -> Layout:
    placements = (Replicate() if p.is_pending else p for p in layout.placements)
    return layout.with_placements(tuple(placements), order=layout.order_names)
