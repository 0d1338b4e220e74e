"""Run a decision on simulated ranks, one after another in this process, and compare with one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright.compat import tree_flatten, tree_leaves, tree_map, tree_map_only
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import Coords
from shardwright.rules.call import Call, TensorInfo, aliases_of
from shardwright.rules.decision import Decision
from shardwright.rules.identity import identity_of, reduction_of_cuts
from shardwright.rules.op import by_name

_TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7}
_TOLERANCE_OF_OTHERS = 1e-5  # a result in float32 of an integer sample


class RuleCheckError(RuleError):
    """A rule is wrong: some cut gives another value than one device. The message is the counterexample."""


@dataclass(frozen=True)
class Sample:
    """One call of the op under test, on whole tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given: Any = (self.args, self.kwargs)
        if not isinstance(given[0], tuple | list) or not isinstance(given[1], dict):
            raise RuleError(
                "Sample(args, kwargs) takes a tuple of positional arguments and a dict of others, got "
                f"a {type(given[0]).__name__} and a {type(given[1]).__name__}: Sample((x,))"
            )


@dataclass(frozen=True)
class Whole:
    """A sample with what one device makes of it: results, and the mutated operands afterwards."""

    sample: Sample
    call: Call
    tensors: list[Tensor]
    results: list[Any]
    mutated: list[Tensor]

    @property
    def has_values(self) -> bool:
        """False for random and uninitialised results: only where they go can be compared.

        Attention is random by its tag; without dropout it is not.
        """
        op, drawn = self.call.op, self.call.bound.get("dropout_p") != 0.0
        random = torch.Tag.nondeterministic_seeded in op.tags and drawn
        return not random and "empty" not in op._schema.name


def run_whole(op: torch._ops.OpOverload, sample: Sample) -> Whole:
    """Run a sample on whole tensors. Raises: RuleError: the op refuses it."""
    fresh = _clone(sample)
    try:
        result = op(*fresh.args, **fresh.kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise RuleError(f"{op.name()} refuses the sample {_described((*sample.args,))}: {error}") from error
    call = describe(op, sample, result)
    after = zip(_tensors(op, fresh), call.flat_operands, strict=True)
    mutated = [x for x, operand in after if operand.mutated]
    return Whole(sample, call, _tensors(op, sample), _flat(result), mutated)


def in_double(sample: Sample) -> Sample:
    """The sample with floating-point tensors in double precision, and arguments that name their dtype."""
    tensors = [value for value in tree_leaves((sample.args, sample.kwargs)) if isinstance(value, Tensor)]
    dtypes = {x.dtype for x in tensors}

    def double(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(_wider(value.dtype))
        return _wider(value) if isinstance(value, torch.dtype) and value in dtypes else value

    return Sample(*tree_map(double, (sample.args, sample.kwargs)))


def _wider(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


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


def _clone(sample: Sample) -> Sample:
    return Sample(*tree_map_only(Tensor, lambda x: x.clone(), (sample.args, sample.kwargs)))


def _tensors(op: torch._ops.OpOverload, sample: Sample) -> list[Tensor]:
    """The tensors of a sample in schema order, as `Call.operands` lists them."""
    given = by_name(op, sample.args, sample.kwargs)
    return [x for value in given.values() for x in _flat(value) if isinstance(x, Tensor)]


# ------------------------------------------------------------------------------------- all the ranks


def simulate(whole: Whole, decision: Decision, parts: Sequence[Sequence[Tensor]]) -> None:
    """Run the decision on every rank of its mesh and compare the joined results with one device's.

    Args:
        whole: the call and its true results.
        decision: what to check.
        parts: per operand, the local tensors of all ranks, in the layout that the decision asks for.

    Raises: RuleCheckError: a local call fails, or a shape, a dtype or a value is not what it must be.
    """
    mesh = decision.inputs[0].mesh_shape
    made: list[list[Any]] = []
    after: list[list[Tensor]] = []
    for index, rank in enumerate(mesh.ranks):
        locals_ = [part[index].clone() for part in parts]
        made.append(_run_local(whole, decision, locals_, mesh.coords_of(rank)))
        after.append(locals_)
    _compare_results(whole, decision, made)
    if whole.has_values:
        _compare_mutated(whole, decision, after)


def _run_local(whole: Whole, decision: Decision, locals_: list[Tensor], coords: Coords) -> list[Any]:
    if not decision.runs_empty and _holds_nothing(decision, coords):
        return _run_nothing(whole, decision, locals_, coords)
    args, kwargs = _local_arguments(whole, locals_, decision.local_args(coords))
    call = whole.call.op if decision.local is None else decision.local.at(whole.call.op, coords)
    try:
        return _flat(call(*args, **kwargs))
    except Exception as error:
        text = f"{_scene(whole, decision)}\n  on coords {coords} the local call fails: {error}"
        raise RuleCheckError(text) from error


def _local_arguments(
    whole: Whole, locals_: list[Tensor], overrides: dict[str, object]
) -> tuple[list[Any], dict[str, Any]]:
    """By position as far as the sample goes without a gap, the rest by name."""
    remaining = iter(locals_)
    arguments = {
        name: tree_map(lambda v: next(remaining) if isinstance(v, Tensor) else v, value)
        for name, value in by_name(whole.call.op, whole.sample.args, whole.sample.kwargs).items()
    }
    arguments |= overrides
    by_position: list[Any] = []
    for argument in whole.call.op._schema.arguments:
        if argument.kwarg_only or argument.name not in arguments:
            break
        by_position.append(arguments.pop(argument.name))
    return by_position, arguments


def _holds_nothing(decision: Decision, coords: Coords) -> bool:
    """Whether a cut left these coords without elements on a dim that has some."""
    return any(
        local == 0 < size
        for layout in decision.inputs
        for local, size in zip(layout.local_shape(coords), layout.shape, strict=False)
    )


def _run_nothing(whole: Whole, decision: Decision, locals_: list[Tensor], coords: Coords) -> list[Any]:
    """What coords without elements make: empty parts, and identities of reductions, in `out=` too."""
    made = [_nothing(layout, decision, coords) for layout in decision.outputs]
    for local, operand in zip(made, aliases_of(whole.call), strict=True):
        if operand is not None and local is not None and whole.call.flat_operands[operand].out:
            locals_[operand].copy_(local)
    return made


def _nothing(layout: Layout | None, decision: Decision, coords: Coords) -> Tensor | None:
    if layout is None:
        return None
    local = torch.zeros(layout.local_shape(coords), dtype=layout.dtype)
    pending = reduction_of_cuts(layout, decision.inputs)
    return local.fill_(identity_of(pending, layout.dtype)) if pending else local


# ---------------------------------------------------------------------------------------- comparison


def _compare_results(whole: Whole, decision: Decision, made: list[list[Any]]) -> None:
    for index, layout in enumerate(decision.outputs):
        expected = whole.results[index]
        if layout is None or not isinstance(expected, Tensor):
            continue
        locals_ = [flat[index] for flat in made]
        for rank, local in zip(layout.ranks, locals_, strict=True):
            _same_metadata(whole, decision, local, layout, layout.coords_of(rank))
        if whole.has_values:
            _same_values(whole, decision, f"result {index}", layout.join(locals_), expected)


def _compare_mutated(whole: Whole, decision: Decision, after: list[list[Tensor]]) -> None:
    mutated = [i for i, operand in enumerate(whole.call.flat_operands) if operand.mutated]
    for expected, operand in zip(whole.mutated, mutated, strict=True):
        layout = decision.inputs[operand]
        pairs = zip(decision.outputs, aliases_of(whole.call), strict=True)
        outs = [out for out, alias in pairs if alias == operand]
        if outs and outs[0] is not None and outs[0].placements != layout.placements:
            continue  # such a result has to be written back, which is not the rule's business
        joined = layout.join([locals_[operand] for locals_ in after])
        name = whole.call.flat_operands[operand].name
        _same_values(whole, decision, f"{name} afterwards", joined, expected)


def _same_metadata(whole: Whole, decision: Decision, local: Tensor, layout: Layout, coords: Coords) -> None:
    wanted = layout.local_shape(coords)
    if tuple(local.shape) != wanted or local.dtype != layout.dtype:
        raise RuleCheckError(
            f"{_scene(whole, decision)}\n  coords {coords} make {list(local.shape)} of {local.dtype}, "
            f"the rule promises {list(wanted)} of {layout.dtype}"
        )


def _same_values(whole: Whole, decision: Decision, what: str, found: Tensor, expected: Tensor) -> None:
    tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE_OF_OTHERS)
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise RuleCheckError(f"{_scene(whole, decision)}\n  {what} differs: {error}") from None


def _scene(whole: Whole, decision: Decision) -> str:
    scalars = {k: v for k, v in whole.call.bound.items() if not isinstance(v, TensorInfo)}
    return f"{whole.call}\n  decided {decision}\n  with    {scalars}"
