"""Check rules on simulated ranks: `map(op, in(x)) == out(op(x))`, with no process and no network.

Each equation that the rules of an op state is expanded over worlds, over even, uneven, empty and scattered
cuts of every label, and over pending values in random parts. The local results, joined, must be the op's
result on the whole tensors. Floating-point samples are computed in float64, so that rounding hides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Pending
from shardwright.rules.binding import bind
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.decision import Decision
from shardwright.rules.equation import Equation
from shardwright.rules.formula import Formula
from shardwright.rules.identity import identity_of
from shardwright.rules.lists import split_call
from shardwright.rules.price import Price
from shardwright.rules.propagate import decide
from shardwright.rules.registry import is_per_element, registry
from shardwright.rules.search import Choice
from shardwright.testing.rule_cases import Case, cases

WORLDS = (1, 2, 3, 5)
_TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7}
_TOLERANCE_OF_OTHERS = 1e-5  # a result in float32 of an integer sample


class RuleCheckError(RuleError):
    """A rule is wrong: some cut gives another value than one device. The message is the counterexample."""


@dataclass(frozen=True)
class Sample:
    """One call of the op under test, on whole tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RuleReport:
    """What was checked. `cut` counts the checks in which some rank held less than the whole tensor."""

    checks: int = 0
    cut: int = 0
    without_formula: int = 0

    def __iadd__(self, other: RuleReport) -> Self:
        self.checks += other.checks
        self.cut += other.cut
        self.without_formula += other.without_formula
        return self


def check_rule(
    op: torch._ops.OpOverload | str,
    samples: Iterable[Sample | tuple[Any, ...]],
    *,
    worlds: Sequence[int] = WORLDS,
    seed: int = 0,
) -> RuleReport:
    """Check every rule of an op on sample calls.

    Args:
        op: an OpOverload, or `ns::name.overload` (`ns::name`: its only or default overload).
        samples: calls, as `Sample` or tuples of positional arguments. Give sizes that do not divide and
            values of both signs; with all sizes equal and then all different a wrong label shows best.
        worlds: sizes of the mesh axis to try.
        seed: of the random parts.

    Returns: how much was checked.
    Raises: RuleCheckError: with the rule, the cut and the first value that differs; also if a label has
        two sizes, or if the samples never gave any rank less than the whole.
    """
    overload = resolve(op)
    report = RuleReport()
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        entry = sample if isinstance(sample, Sample) else Sample(tuple(sample))
        report += _check_sample(overload, entry, worlds, generator)
    if report.checks and not report.cut and any(n > 1 for n in worlds):
        raise RuleCheckError(f"{overload.name()}: no sample was ever cut, so nothing was tested")
    return report


def resolve(op: torch._ops.OpOverload | str) -> torch._ops.OpOverload:
    """The overload that a name means. Raises: RuleError: there is none, or several."""
    if isinstance(op, torch._ops.OpOverload):
        return op
    namespace, _, name = op.partition("::")
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


def describe(op: torch._ops.OpOverload, sample: Sample, result: object) -> Call:
    """The logical call of a sample."""
    return Call(
        op,
        tuple(_described(value) for value in sample.args),
        tuple((name, _described(value)) for name, value in sample.kwargs.items()),
        tuple(_info(value) if isinstance(value, Tensor) else None for value in _flat(result)),
    )


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _info(value)
    if isinstance(value, list | tuple):
        return tuple(_described(entry) for entry in value)
    return value


def _info(x: Tensor) -> TensorInfo:
    return TensorInfo(tuple(x.shape), tuple(x.stride()), x.dtype)


def _flat(result: object) -> list[Any]:
    return tree_flatten(result)[0]


def in_double(sample: Sample) -> Sample:
    """The sample with floating-point tensors in float64."""

    def double(x: Tensor) -> Tensor:
        wider = torch.complex128 if x.is_complex() else torch.float64
        return x.detach().to(wider) if x.is_floating_point() or x.is_complex() else x.detach()

    args, kwargs = tree_map_only(Tensor, double, (sample.args, sample.kwargs))
    return Sample(args, kwargs)


# ---------------------------------------------------------------------------------------- one sample


@dataclass(frozen=True)
class _Whole:
    """A sample with what one device makes of it."""

    sample: Sample
    call: Call
    tensors: list[Tensor]
    results: list[Any]
    mutated: list[Tensor]


def _check_sample(
    op: torch._ops.OpOverload, sample: Sample, worlds: Sequence[int], generator: torch.Generator
) -> RuleReport:
    report = RuleReport()
    whole = _run_whole(op, in_double(sample))
    if is_per_element(op):
        split = split_call(whole.call)
        if split is None or len(split) != 1:
            raise RuleError(f"{op.name()}: check list ops with lists of one tensor")
        whole = _Whole(whole.sample, split[0].call, whole.tensors, whole.results, whole.mutated)
    formulas = list(registry.formulas(whole.call))
    report.without_formula += not formulas
    for stated in formulas:
        equation = _bound(stated, whole.call)
        for n in worlds:
            for case in cases(equation, whole.call, n, generator):
                if not _in_domain(case, whole.tensors):
                    continue
                report.checks += 1
                report.cut += _check_case(whole, equation, n, case, generator)
    return report


def _in_domain(case: Case, tensors: list[Tensor]) -> bool:
    """Whether the pending placements of a case have a meaning for these values."""
    pairs = zip(case.candidate.inputs, tensors, strict=True)
    return all(not isinstance(placement, Pending) or placement.in_domain(x) for placement, x in pairs)


def _bound(stated: Formula, call: Call) -> Equation:
    try:
        return bind(stated, call)
    except RuleError as error:
        raise RuleCheckError(f"{call}\n  rule   {stated}\n  does not fit: {error}") from None


def _run_whole(op: torch._ops.OpOverload, sample: Sample) -> _Whole:
    fresh = _clone(sample)
    result = op(*fresh.args, **fresh.kwargs)
    call = describe(op, sample, result)
    tensors = _tensors(op, sample)
    after = _tensors(op, fresh)
    mutated = [x for x, operand in zip(after, call.flat_operands, strict=True) if operand.mutated]
    return _Whole(sample, call, tensors, _flat(result), mutated)


def _clone(sample: Sample) -> Sample:
    args, kwargs = tree_map_only(Tensor, lambda x: x.clone(), (sample.args, sample.kwargs))
    return Sample(args, kwargs)


def _tensors(op: torch._ops.OpOverload, sample: Sample) -> list[Tensor]:
    """The tensors of a sample in schema order, as `Call.operands` lists them."""
    names = [argument.name for argument in op._schema.arguments]
    values = {**dict(zip(names, sample.args, strict=False)), **sample.kwargs}
    return [x for name in names for x in _flat(values.get(name)) if isinstance(x, Tensor)]


# ------------------------------------------------------------------------------------------ one case


def _check_case(
    whole: _Whole, equation: Equation, n: int, case: Case, generator: torch.Generator
) -> bool:
    """Run one candidate on n simulated ranks. Returns: whether something was cut or pending."""
    mesh = MeshShape(("x",), (n,))
    layouts = tuple(
        Layout(mesh, (placement,), info.shape, dtype=info.dtype, stride=info.stride)
        for placement, info in zip(case.candidate.inputs, whole.call.operands, strict=True)
    )
    choice = Choice((case.candidate,), Price(0, 0, 1.0, 0))
    decision = decide(whole.call, layouts, (0,), equation, choice)
    parts = [
        case.parts(layout, x, n, generator) for layout, x in zip(layouts, whole.tensors, strict=True)
    ]
    made: list[list[Any]] = []
    after: list[list[Tensor]] = []
    for coord in range(n):
        locals_ = [part[coord].clone() for part in parts]
        made.append(_run_local(whole, decision, equation, locals_, (coord,)))
        after.append(locals_)
    _compare_results(whole, decision, equation, made)
    _compare_mutated(whole, decision, equation, after)
    return n > 1 and any(not layout.is_fully_replicated for layout in layouts)


def _run_local(
    whole: _Whole, decision: Decision, equation: Equation, locals_: list[Tensor], coords: tuple[int, ...]
) -> list[Any]:
    if not decision.runs_empty and _holds_nothing(decision, coords):
        return _run_nothing(decision, equation, locals_, coords)
    overrides = decision.local_args(coords)
    sample = _substituted(whole, locals_, overrides)
    try:
        return _flat(whole.call.op(*sample.args, **sample.kwargs))
    except Exception as error:
        raise RuleCheckError(
            f"{_scene(whole, equation, decision)}\n  on coord {coords[0]} the local call fails: {error}"
        ) from error


def _holds_nothing(decision: Decision, coords: tuple[int, ...]) -> bool:
    """Whether a cut left this coord without elements on a dim that has some."""
    return any(
        local == 0 < size
        for layout in decision.inputs
        for local, size in zip(layout.local_shape(coords), layout.shape, strict=False)
    )


def _run_nothing(
    decision: Decision, equation: Equation, locals_: list[Tensor], coords: tuple[int, ...]
) -> list[Any]:
    """What a coord without elements makes: empty parts, and identities of reductions, in `out=` too."""
    made = [_nothing(layout, coords) for layout in decision.outputs]
    for local, operand in zip(made, equation.aliases, strict=True):
        if operand is not None and local is not None and equation.operands[operand].out:
            locals_[operand].copy_(local)
    return made


def _nothing(layout: Layout | None, coords: tuple[int, ...]) -> Tensor | None:
    if layout is None:
        return None
    local = torch.zeros(layout.local_shape(coords), dtype=layout.dtype)
    placement = layout.placements[0]
    return local.fill_(identity_of(placement, layout.dtype)) if placement.is_pending else local


def _substituted(whole: _Whole, locals_: list[Tensor], overrides: dict[str, object]) -> Sample:
    op = whole.call.op
    names = [argument.name for argument in op._schema.arguments]
    values = {**dict(zip(names, whole.sample.args, strict=False)), **whole.sample.kwargs}
    remaining = iter(locals_)
    local: dict[str, Any] = {}
    for name in names:
        if name in values:
            local[name] = tree_map(lambda v: next(remaining) if isinstance(v, Tensor) else v, values[name])
    local.update(overrides)
    return Sample((), local)


# ---------------------------------------------------------------------------------------- comparison


def _compare_results(
    whole: _Whole, decision: Decision, equation: Equation, made: list[list[Any]]
) -> None:
    without_values = _has_no_values(whole.call.op)
    for index, layout in enumerate(decision.outputs):
        expected = whole.results[index]
        if layout is None or not isinstance(expected, Tensor):
            continue
        locals_ = [flat[index] for flat in made]
        for coord, local in enumerate(locals_):
            _same_metadata(whole, decision, equation, local, layout, coord)
        if without_values:
            continue
        _same_values(whole, decision, equation, f"result {index}", layout.join(locals_), expected)


def _has_no_values(op: torch._ops.OpOverload) -> bool:
    """Random and uninitialised results: only where they go can be checked."""
    return torch.Tag.nondeterministic_seeded in op.tags or "empty" in op._schema.name


def _compare_mutated(
    whole: _Whole, decision: Decision, equation: Equation, after: list[list[Tensor]]
) -> None:
    if _has_no_values(whole.call.op):
        return
    mutated = [i for i, operand in enumerate(whole.call.flat_operands) if operand.mutated]
    for expected, operand in zip(whole.mutated, mutated, strict=True):
        layout = decision.inputs[operand]
        pairs = zip(decision.outputs, equation.aliases, strict=True)
        outs = [out for out, alias in pairs if alias == operand]
        if outs and outs[0] is not None and outs[0].placements != layout.placements:
            continue
        joined = layout.join([locals_[operand] for locals_ in after])
        name = whole.call.flat_operands[operand].name
        _same_values(whole, decision, equation, f"{name} afterwards", joined, expected)


def _same_metadata(
    whole: _Whole, decision: Decision, equation: Equation, local: Tensor, layout: Layout, coord: int
) -> None:
    wanted = layout.local_shape((coord,))
    if tuple(local.shape) != wanted or local.dtype != layout.dtype:
        raise RuleCheckError(
            f"{_scene(whole, equation, decision)}\n  coord {coord} makes {list(local.shape)} of "
            f"{local.dtype}, the rule promises {list(wanted)} of {layout.dtype}"
        )


def _same_values(
    whole: _Whole, decision: Decision, equation: Equation, what: str, found: Tensor, expected: Tensor
) -> None:
    tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE_OF_OTHERS)
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise RuleCheckError(f"{_scene(whole, equation, decision)}\n  {what} differs: {error}") from None


def _scene(whole: _Whole, equation: Equation, decision: Decision) -> str:
    scalars = {k: v for k, v in whole.call.bound.items() if not isinstance(v, TensorInfo)}
    return f"{whole.call}\n  rule   {equation.formula}\n  where  {decision}\n  with   {scalars}"

