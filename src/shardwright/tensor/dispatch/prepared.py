"""What was decided of a call that is one local call per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.layout.layout import Layout
from shardwright.rules.any_size import AnySize
from shardwright.rules.call import Call
from shardwright.rules.formula import LocalForm
from shardwright.tensor.spec import Spec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Move:
    """One operand must have another layout before the local call."""

    operand: int
    target: Layout


@dataclass(frozen=True, slots=True)
class Return:
    """What the local call wrote of one operand has another layout than the operand, and goes back to that."""

    operand: int
    held: Layout


@dataclass(slots=True)
class Prepared:
    """A decided call on one rank: nothing in it depends on the data.

    Frozen but for `simple` and `checked`: the rule's promise about local shapes is tested on the first run.
    """

    moves: tuple[Move, ...]
    overrides: tuple[tuple[str, Any], ...]  # schema argument -> its value in the local call
    results: tuple[Spec | None, ...]
    written: tuple[int | None, ...]  # per result: the operand that it is (in-place and out=)
    mutated: tuple[int, ...]
    brought_back: tuple[Return, ...]  # written operands that the call leaves in another layout
    skip: bool  # this rank holds nothing of an operand: no kernel is called
    reason: str
    fallback: bool
    gather_all: bool  # shapes depend on the data: the results' layouts are found after the call
    local: LocalForm | None = None  # what this rank calls in place of the op
    outs: tuple[int, ...] = ()  # operands that are only written: `out=`
    call: Call | None = None  # of an op that undoes views: `views.put_back` may do better
    checked: bool = False
    any_size: AnySize | None = None  # the same call on tensors of other sizes
    simple: bool = False  # found after the first run: see `run.is_simple`


def written_operands(func: torch._ops.OpOverload, call: Call) -> tuple[int | None, ...]:
    """Per tensor result: the operand whose storage it is, for in-place and out= calls."""
    sets = {}
    for index, operand in enumerate(call.flat_operands):
        argument = next(a for a in func._schema.arguments if a.name == operand.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            for name in argument.alias_info.before_set:
                sets[name] = index
    found: list[int | None] = []
    for result in func._schema.returns:
        alias = result.alias_info
        names = alias.before_set if alias is not None and alias.is_write else ()
        found.append(next((sets[name] for name in names if name in sets), None))
    return tuple(found)
