"""Calls on lists of tensors that do one thing per element: foreach ops and fused optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.rules.call import Call, Operand, TensorInfo, parameters_of
from shardwright.rules.decision import Decision


@dataclass(frozen=True, slots=True)
class ElementCall:
    """The part of a list call that concerns one element, as a call on lists of length one.

    Args:
        call: lists cut down to this element.
        operands: which operands of the whole call it has, by index.
        results: which results of the whole call it makes, by index.
    """

    call: Call
    operands: tuple[int, ...]
    results: tuple[int, ...]


def split_call(call: Call) -> tuple[ElementCall, ...] | None:
    """One call per element of the lists; None if the lists have different lengths or none has elements."""
    lists = _list_names(call)
    lengths = {len(call.arg(name)) for name in lists}
    if len(lengths) != 1 or len(call.results) not in {0, 1, *lengths}:
        return None
    length = lengths.pop()
    per_element = len(call.results) == length and call.results != (None,)
    return tuple(_element(call, lists, i, with_result=per_element) for i in range(length))


def _list_names(call: Call) -> list[str]:
    """The tensor lists of the call that have elements."""
    return [
        parameter.name
        for parameter in parameters_of(call.op)
        if parameter.is_tensor and parameter.is_list and call.arg(parameter.name)
    ]


def _element(call: Call, lists: list[str], index: int, *, with_result: bool) -> ElementCall:
    values: dict[str, object] = {}
    for parameter in parameters_of(call.op):
        value = call.arg(parameter.name)
        values[parameter.name] = (value[index],) if parameter.name in lists else _hashable(value)
    results: tuple[TensorInfo | None, ...] = (call.results[index],) if with_result else ()
    operands = tuple(i for i, operand in enumerate(call.flat_operands) if operand.position in {None, index})
    part = Call(call.op, tuple(values.values()), (), results)
    return ElementCall(part, operands, (index,) if with_result else ())


def _hashable(value: object) -> object:
    return tuple(_hashable(v) for v in value) if isinstance(value, list | tuple) else value


def join_decisions(call: Call, parts: Sequence[ElementCall], decisions: Sequence[Decision]) -> Decision:
    """The decision for the whole call. Raises: RuleError: elements disagree on an operand they share."""
    inputs: dict[int, Layout] = {}
    outputs: list[Layout | None] = [None] * len(call.results)
    rewrites: set[int] = set()
    for part, decision in zip(parts, decisions, strict=True):
        for operand, layout in zip(part.operands, decision.inputs, strict=True):
            if inputs.setdefault(operand, layout) != layout:
                raise RuleError(_disagree(call, call.flat_operands[operand], inputs[operand], layout))
        for result, made in zip(part.results, decision.outputs, strict=True):
            outputs[result] = made
        rewrites.update(part.operands[i] for i in decision.rewrites)
    reasons = list(dict.fromkeys(decision.reason for decision in decisions))
    more = f" (and {len(reasons) - 1} other ways)" if len(reasons) > 1 else ""
    return Decision(
        inputs=tuple(inputs[i] for i in range(len(inputs))),
        outputs=tuple(outputs),
        reason=f"{reasons[0]}{more}",
        fallback=any(decision.fallback for decision in decisions),
        cost_bytes=sum(decision.cost_bytes for decision in decisions),
        # Of one scalar a rank may own nothing, its counter neither, which the kernel of a fused step reads.
        runs_empty=len(parts) > 1 or any(info.shape for info in call.operands),
        rewrites=tuple(sorted(rewrites)),
    )


def _disagree(call: Call, operand: Operand, one: Layout, other: Layout) -> str:
    return (
        f"{call.op.name()}: elements of the list need {operand.name} in different layouts\n  {one}\n  "
        f"{other}\nfix: replicate {operand.name} first"
    )
