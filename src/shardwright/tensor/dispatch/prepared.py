"""What was decided of a call that is one local call per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.layout.layout import Layout
from shardwright.rules.any_size import AnySize
from shardwright.rules.call import Call
from shardwright.rules.formula import LocalForm
from shardwright.tensor.spec import Spec


@dataclass(frozen=True, slots=True)
class Move:
    """One operand must have another layout before the local call.

    of_terms: it is pending: a finished form of it may be known.
    """

    operand: int
    target: Layout
    of_terms: bool


@dataclass(frozen=True, slots=True)
class Return:
    """What the local call wrote of one operand has another layout than the operand, and goes back to that."""

    operand: int
    held: Layout


@dataclass(frozen=True, slots=True)
class Derivation:
    """How a call computes terms.

    operand: of whose terms alone.
    is_statistic: it is smaller than these.
    writes_out: it is not: the operand repeats a number.
    """

    operand: int
    is_statistic: bool
    writes_out: bool


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
    derived: Derivation | None = None  # the result is terms of one operand's: `derived`
    any_size: AnySize | None = None  # the same call on tensors of other sizes
    simple: bool = False  # found after the first run: see `run.is_simple`
