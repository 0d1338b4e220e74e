"""Which results of a call are tensors that it was given: in-place ops and `out=`."""

from __future__ import annotations

import torch

from shardwright.remember import remembered
from shardwright.rules.call import Call


def aliases_of(call: Call) -> tuple[int | None, ...]:
    """Per flattened result, the operand that the op writes and returns as this result, or None.

    Empty where data decide what the results are: see `aliases_of_returns`.
    """
    found = aliases_of_returns(call)
    more = len(call.results) - len(found)  # a list of results is one return
    return found[: len(call.results)] + (None,) * more


def aliases_of_returns(call: Call) -> tuple[int | None, ...]:
    """As `aliases_of`, per return of the schema: known before the results are."""
    names = [operand.name for operand in call.flat_operands]
    return tuple([names.index(name) if name in names else None for name in _alias_sets(call.op)])


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
