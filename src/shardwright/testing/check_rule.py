"""Check rules on simulated ranks: `map(op, in(x)) == out(op(x))`, with no process and no network.

Each equation that the rules of an op state is expanded over worlds, over even, uneven, empty and scattered
cuts of every label, and over pending values in random parts. The local results, joined, must be the op's
result on the whole tensors. Floating-point samples are computed in float64, so that rounding hides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Pending
from shardwright.rules.binding import bind
from shardwright.rules.call import Call
from shardwright.rules.candidates import Candidate
from shardwright.rules.equation import Equation
from shardwright.rules.formula import Formula
from shardwright.rules.lists import split_call
from shardwright.rules.op import is_per_element
from shardwright.rules.price import Price
from shardwright.rules.propagate import decide
from shardwright.rules.registry import op_key, registry
from shardwright.rules.search import Choice
from shardwright.testing.meshes import sizes_of
from shardwright.testing.rule_cases import cases, parts_of
from shardwright.testing.simulate import RuleCheckError, Sample, Whole, in_double, run_whole, simulate

WORLDS = (1, 2, 3, 5)


@dataclass
class RuleReport:
    """What was checked.

    Args:
        checks: candidates that were run and compared.
        cut: those in which some rank held less than the whole, or a pending value.
        without_formula: samples of which the rules say nothing.
    """

    checks: int = 0
    cut: int = 0
    without_formula: int = 0

    def __iadd__(self, other: RuleReport) -> Self:
        self.checks += other.checks
        self.cut += other.cut
        self.without_formula += other.without_formula
        return self


def check_rule(
    op: torch._ops.OpOverload | torch._ops.OpOverloadPacket | str,
    samples: Iterable[Sample | tuple[Any, ...] | Tensor],
    *,
    formula: Formula | str | None = None,
    worlds: Sequence[int] = WORLDS,
    seed: int = 0,
) -> RuleReport:
    """Check every rule of an op on sample calls, or one formula before it is registered.

    Args:
        op: an overload, or `ns::name.overload` (`ns::name`, `torch.ops.ns.name`: the only or default one).
        samples: calls, as `Sample`, tuples of positional arguments, or a single tensor. Give sizes that do
            not divide and values of both signs; with all sizes equal and then all different a wrong label
            shows best.
        formula: check this one, or the text of one, instead of the registered rules.
        worlds: sizes of the mesh axis to try.
        seed: of the random parts.

    Returns: how much was checked.
    Raises: RuleCheckError: with the rule, the cut and the first value that differs; also if a label has
        two sizes, or if the samples never gave any rank less than the whole. RuleError: no op, sample or
        formula, or a sample that the op refuses.
    """
    overload, worlds, stated = resolve(op), sizes_of("worlds", worlds), _stated(formula)
    report = RuleReport()
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        report += _check_sample(overload, as_sample(sample), stated, worlds, generator)
    untested = not report.cut and any(n > 1 for n in worlds)
    if untested and (report.checks or not report.without_formula):
        raise RuleCheckError(f"{overload.name()}: no sample was ever cut, so nothing was tested")
    return report


def as_sample(given: Any) -> Sample:
    """A call as a `Sample`."""
    if isinstance(given, Sample):
        return given
    if not isinstance(given, Tensor | tuple | list):
        raise RuleError(f"{given!r:.60} is no sample: give a Sample, a tuple of arguments, or a tensor")
    return Sample((given,)) if isinstance(given, Tensor) else Sample(tuple(given))


def _stated(given: object) -> Formula | None:
    if given is None or isinstance(given, Formula):
        return given
    if isinstance(given, str):
        return Formula(given)
    raise RuleError(f"formula={given!r:.60} is no formula: give its text, such as 'm k, k n -> m n'")


def resolve(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket | str) -> torch._ops.OpOverload:
    """The overload that a name means. Raises: RuleError: there is none, or several."""
    if isinstance(op, torch._ops.OpOverload):
        return op
    namespace, _, name = op_key(op).partition("::")
    packet_name, _, overload = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), packet_name)
    except AttributeError:
        raise RuleError(f"{op} is not an op that torch knows") from None
    known = packet.overloads()
    chosen = overload or ("default" if "default" in known else known[0] if len(known) == 1 else "")
    if chosen not in known:
        raise RuleError(f"{op}: say which overload is meant: {', '.join(known)}")
    found: torch._ops.OpOverload = getattr(packet, chosen)
    return found


def _check_sample(
    op: torch._ops.OpOverload,
    sample: Sample,
    given: Formula | None,
    worlds: Sequence[int],
    generator: torch.Generator,
) -> RuleReport:
    report = RuleReport()
    whole = _one_element(run_whole(op, in_double(sample)))
    formulas = list(registry.formulas(whole.call)) if given is None else [given]
    report.without_formula += not formulas
    for stated in formulas:
        equation = _equation(stated, whole.call)
        for n in worlds:
            for candidate in cases(equation, whole.call, n, generator):
                if _in_domain(candidate, whole):
                    report.checks += 1
                    report.cut += _check_candidate(whole, equation, n, candidate, generator)
    return report


def _one_element(whole: Whole) -> Whole:
    """A call on lists of one tensor, as the rules see each element of a list."""
    if not is_per_element(whole.call.op):
        return whole
    split = split_call(whole.call)
    if split is None or len(split) != 1:
        raise RuleError(f"{whole.call.op.name()}: check list ops with lists of one tensor")
    return replace(whole, call=split[0].call)


def _equation(stated: Formula, call: Call) -> Equation:
    try:
        return bind(stated, call)
    except RuleError as error:
        raise RuleCheckError(f"{call}\n  rule   {stated}\n  does not fit: {error}") from None


def _in_domain(candidate: Candidate, whole: Whole) -> bool:
    """Whether the pending placements of a candidate have a meaning for these values."""
    pairs = zip(candidate.inputs, whole.tensors, strict=True)
    return all(not isinstance(placement, Pending) or placement.in_domain(x) for placement, x in pairs)


def _check_candidate(
    whole: Whole, equation: Equation, n: int, candidate: Candidate, generator: torch.Generator
) -> bool:
    """Run one candidate on n simulated ranks. Returns: whether something was cut or pending."""
    mesh = MeshShape(("x",), (n,))
    layouts = tuple(
        Layout(mesh, (placement,), info.shape, dtype=info.dtype, stride=info.stride)
        for placement, info in zip(candidate.inputs, whole.call.operands, strict=True)
    )
    choice = Choice((candidate,), Price(0, 0, 1.0, 0, 0))
    decision = decide(whole.call, layouts, (0,), equation, choice)
    parts = [parts_of(layout, x, n, generator) for layout, x in zip(layouts, whole.tensors, strict=True)]
    simulate(whole, decision, parts)
    return n > 1 and any(not layout.is_fully_replicated for layout in layouts)
