"""Every operand whole: the way of an op that no rule knows, and of results whose shape the data decide."""

from __future__ import annotations

from shardwright.rules.call import aliases_of_returns
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.kernels import kernel_of
from shardwright.tensor.dispatch.prepared import Move, Prepared, Return


def gathered(asked: Asked) -> Prepared | None:
    """Right for any deterministic op, and what comes out says what its shape is."""
    reason, call, tensors = asked.needs_whole_operands, asked.call, asked.tensors
    if not reason:
        return None
    layouts = [t._spec.layout for t in tensors]
    moves = tuple(Move(i, own.replicated(), bool(own.pending_axes)) for i, own in enumerate(layouts))
    moves = tuple(m for m in moves if m.target != layouts[m.operand])
    mutated = tuple(i for i, o in enumerate(call.flat_operands) if o.mutated)
    return Prepared(
        moves=moves,
        overrides=(),
        results=(),
        written=aliases_of_returns(call),
        mutated=mutated,
        brought_back=tuple(Return(m.operand, m.target) for m in moves if m.operand in mutated),
        skip=False,
        reason=reason,
        fallback=True,
        gather_all=True,
        local=kernel_of(call.op, {t.dtype for t in tensors}),
    )
