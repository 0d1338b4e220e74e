"""Which results of a call are tensors that it was given: in-place ops and `out=`."""

from __future__ import annotations

import torch

from shardwright.remember import remembered
from shardwright.rules.call import Call


def aliases_of(call: Call) -> tuple[int | None, ...]:
    """Per flattened result, the operand that the op writes and returns as this result, or None."""
    by_set = _alias_sets(call.op)
    names = [operand.name for operand in call.flat_operands]
    found: list[int | None] = []
    for index in range(len(call.results) or len(by_set)):  # what data decide has no results yet
        name = by_set[index] if index < len(by_set) else None
        found.append(names.index(name) if name in names else None)
    return tuple(found)


@remembered(4096)
def _alias_sets(op: torch._ops.OpOverload) -> tuple[str | None, ...]:
    writes = {
        frozenset(argument.alias_info.before_set): argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    found: list[str | None] = []
    for result in op._schema.returns:
        info = result.alias_info
        found.append(writes.get(frozenset(info.before_set)) if info is not None and info.is_write else None)
    return tuple(found)
