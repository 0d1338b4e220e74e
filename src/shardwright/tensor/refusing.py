"""What `explicit()` refuses of a prepared call, in words that teach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwright.errors import ImplicitRedistributionError
from shardwright.plan.redistribution import plan_redistribution
from shardwright.rules.refusal import implicit_text
from shardwright.tensor.metadata import described_call
from shardwright.tensor.modes import is_explicit

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from shardwright.tensor.dtensor import DTensor
    from shardwright.tensor.prepare import Prepared


def refuse_implicit(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    prepared: Prepared,
    tensors: list[DTensor],
) -> None:
    """Raise for a call that would communicate implicitly while `explicit()` is active.

    A move that costs nothing (taking a slice of what the rank holds, embedding a finished value) is no
    communication and passes.
    """
    if not is_explicit():
        return
    layouts = [t._spec.layout for t in tensors]
    wanted = list(layouts)
    for move in prepared.moves:
        wanted[move.operand] = move.target
    moved = (move.operand for move in prepared.moves)
    if any(plan_redistribution(layouts[i], wanted[i]).total_bytes for i in moved):
        call = described_call(func, args, kwargs)
        raise ImplicitRedistributionError(implicit_text(call, layouts, wanted, prepared.reason))
