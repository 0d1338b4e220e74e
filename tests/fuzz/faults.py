"""Faults planted on ranks, to see that random programs find them; each stands for a class that was met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import shardwright as sw
from shardwright.rules import registry
from shardwright.tensor.dispatch.ways import lists
from shardwright.tensor.views import write_back
from tests.fuzz.families import control, views
from tests.fuzz.program import Program
from tests.fuzz.ranks import check_programs
from tests.fuzz.scope import Scope


@dataclass(frozen=True)
class Fault:
    """A fault, and the families of steps that can meet it."""

    plant: Callable[[], None]
    families: tuple[Callable[[Scope], object], ...]


def _wrong_rule() -> None:
    """tanh of terms, added."""
    sw.rule("aten::tanh", "... -> ...", hom=("self: sum->sum",))


def _swapped_sign() -> None:
    """The negative of a minimum taken for the minimum of negatives."""
    for rule in sw.rules_of(torch.ops.aten.neg.default):
        registry.registry.remove(rule)
    sw.rule("aten::neg", "... -> ...", hom=("self: min->min",))


def _forgotten_write() -> None:
    """A write into a view that had to copy stays in the copy."""
    write_back._write_back = lambda view, before: None


def _hidden_writes() -> None:
    """The version counters do not see what a list op writes."""
    lists._raise_versions = lambda func, written: None


def _call(name: str, kinds: str = "f") -> Callable[[Scope], object]:
    return lambda s: s.do(f"torch.{name}", s.pick(kinds))


def _least(s: Scope) -> object:
    """A leaf that is a pending minimum."""
    x = s.leaf((4, 3), grad=False)
    s.leaves[-1] = replace(s.leaves[-1], placements=("Partial('min')",))
    return s.do("torch.neg", x)


def _write(s: Scope) -> object:
    return s.do(
        ".mul_", views.take_view(s, s.pick("f", written=True)), 3, form="through a view", result=False
    )


def _write_dealt(s: Scope) -> object:
    """A slice of a leaf that a rank holds in pieces: its local part must be a copy."""
    x = s.leaf((8, 3), grad=False)
    s.leaves[-1] = replace(s.leaves[-1], placements=("BlockCyclic(0, 3)",))
    (view,) = s.do("[]", x, slice(1, None, 3), form="view")
    return s.do(".mul_", view, 3, form="through a view", result=False)


def _write_list(s: Scope) -> object:
    return s.do("torch._foreach_mul_", [s.pick("f", written=True)], 3, form="list, in place", result=False)


FAULTS = {
    "wrong rule": Fault(_wrong_rule, (_call("tanh"), views.views)),
    "swapped sign": Fault(_swapped_sign, (_call("neg"), _least, views.views)),
    "forgotten write": Fault(_forgotten_write, (_write, _write_dealt, views.views)),
    "hidden writes": Fault(_hidden_writes, (_write_list, _call("exp"), control.backward)),
}


def check_with(fault: str, programs: list[Program], file: str) -> None:
    """`check_programs` on ranks where a fault was planted; they are of no other use afterwards."""
    FAULTS[fault].plant()
    check_programs(programs, file)
