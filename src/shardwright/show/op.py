"""`explain`: what an op would do with operands of these layouts, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import tree_flatten, tree_map_only
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_of
from shardwright.plan.decide import plan_redistribution
from shardwright.rules.algorithms.algorithm import Chosen, algorithm_for
from shardwright.rules.alternatives import Way, alternatives
from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.decision import Decision
from shardwright.rules.fix import operand_names
from shardwright.rules.propagate import propagate
from shardwright.rules.registry import registry, rules_of
from shardwright.show.rehearsal import Rehearsal, rehearse


@dataclass(frozen=True)
class Explanation:
    """One decided call: print it.

    decision: the cheapest rule. moves: per operand what its redistribution would move, over all ranks.
    chosen: the algorithm that runs in its place, where one sends no more; None: the rule runs.
    way, alternatives: the chosen way with its price, and what else each axis could do; None without a rule.
    rehearsal: what one rank would run and send, as a trace lists it; None where only data could tell.
    """

    call: Call
    operands: tuple[Layout, ...]
    decision: Decision
    moves: tuple[int, ...]
    chosen: Chosen | None = None
    way: Way | None = None
    alternatives: tuple[Way, ...] = ()
    rehearsal: Rehearsal | None = None

    @property
    def fallback(self) -> bool:
        """Is anything made whole for want of a rule?"""
        return self.decision.fallback if self.rehearsal is None else self.rehearsal.fallback

    @property
    def op(self) -> torch._ops.OpOverload:
        """The overload that was decided."""
        return self.call.op

    def __str__(self) -> str:
        if self.chosen is not None:
            return self._of_algorithm(self.chosen)
        lines = [f"{self.op.name()}: {self.decision.reason}"]
        names = operand_names(self.call)
        several = len(self.decision.outputs) > 1
        width = max(map(len, ("instead", *names, *(["result 0"] if several else ()))))
        pairs = zip(self.operands, self.decision.inputs, self.moves, strict=True)
        for name, (have, want, moved) in zip(names, pairs, strict=True):
            how = "as it is" if have == want else f"-> {want}   {moved} B over all ranks"
            lines.append(f"  {name:<{width}}  {have}   {how}")
        for index, out in enumerate(self.decision.outputs):
            lines.append(f"  {f'result {index}' if several else 'result':<{width}}  {out}")
        lines += [f"  {'price':<{width}}  {self.way}"] if self.way else []
        lines += [f"  {'instead':<{width}}  {way}" for way in self.alternatives]
        lines += [f"  {'rule':<{width}}  {rule}" for rule in rules_of(self.op)]
        lines += [] if self.rehearsal is None or self.way is not None else self._sent(self.rehearsal)
        return "\n".join(lines)

    @staticmethod
    def _sent(rehearsal: Rehearsal) -> list[str]:
        """What the rehearsed rank sends, where the moves of operands do not tell it."""
        who = f"  rank {rehearsal.rank} sends"
        sent = [f"{who} {e.bytes_sent} B: {e.op} over {e.axis}: {e.reason}" for e in rehearsal.collectives]
        return sent or [f"{who} nothing"]

    def _of_algorithm(self, chosen: Chosen) -> str:
        pairs = zip(operand_names(self.call), self.operands, strict=True)
        lines = [f"{self.op.name()}: {chosen.reason}"]
        lines += [f"  {name}  {have}   as it is" for name, have in pairs]
        lines += [f"  instead of {self.decision.reason}: {self.decision.cost_bytes} B"]
        lines += [f"  rule       {rule}" for rule in rules_of(self.op)]
        lines += [f"  algorithm  {entry.text}" for entry in registry.algorithms_of(self.op)]
        lines += [] if self.rehearsal is None else self._sent(self.rehearsal)
        return "\n".join(lines)


def explain(
    op: torch._ops.OpOverload | torch._ops.OpOverloadPacket | str,
    *operands: Any,
    rank: int | None = None,
    **named: Any,
) -> Explanation:
    """Which rule an op would use on these operands, what would move and what comes out; nothing is sent.

    The op is rehearsed as one rank on tensors without data, so an op that consists of others is explained
    by them.

    Args:
        op: `torch.ops.aten.mm`, or its name ("aten::mm"), of which that overload is meant which takes these
            operands; or one overload ("aten::add.Tensor").
        operands: the call's positional arguments, a `Layout` or a DTensor for each tensor.
        rank: who is rehearsed; by default the mesh's first.
        named: the call's keyword arguments, a `Layout` for each tensor.
    Raises: RuleError: no such op, arguments that it refuses, a plain tensor among them, or no layout.
    Cost: none.
    """
    _refuse_plain(operands, named)
    operands, named = tree_map_only(TorchDTensor, layout_of, (operands, named))
    if "device" in named:  # what goes where is the same on any
        named["device"] = torch.device("meta")
    layouts = tuple(value for value in tree_flatten((operands, named))[0] if isinstance(value, Layout))
    keywords = tuple((name, _described(value)) for name, value in named.items())
    overload, results = _taken(_overloads(op), operands, named)
    if not layouts:
        raise RuleError(f"explain: {overload.name()} of no distributed tensor sends nothing: give layouts")
    call = Call(overload, tuple(map(_described, operands)), keywords, results)
    decision = propagate(call, layouts)
    moves = tuple(
        0 if have == want else plan_redistribution(have, want).total_bytes
        for have, want in zip(layouts, decision.inputs, strict=True)
    )
    way, others = alternatives(call, layouts) or (None, ())
    chosen = algorithm_for(call, layouts, decision)
    rehearsal = rehearse(overload, operands, named, rank)
    if rehearsal is not None and _runs_otherwise(overload, decision, moves, rehearsal):
        decision, moves = _as_it_runs(call, layouts, decision, rehearsal), (0,) * len(layouts)
        chosen, way, others = None, None, ()
    return Explanation(call, layouts, decision, moves, chosen, way, others, rehearsal)


def _refuse_plain(operands: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Where a plain tensor lives is not written on it, and it would be left out of what is told."""
    for value in tree_flatten((operands, named))[0]:
        if isinstance(value, torch.Tensor) and not isinstance(value, TorchDTensor):
            raise RuleError(
                f"explain: a plain tensor of shape {tuple(value.shape)} has no layout: give "
                "sw.Layout(mesh, placements, shape, dtype=...) in its place, or a DTensor"
            )


def _runs_otherwise(
    op: torch._ops.OpOverload, decision: Decision, moves: tuple[int, ...], rehearsal: Rehearsal
) -> bool:
    """As other ops, as a view, or in another way that no rule of the op's own describes."""
    own = op.name() in rehearsal.parts[:1]
    nothing_moves = any(moves) and not rehearsal.collectives
    return not own or nothing_moves or decision.fallback != rehearsal.fallback


def _as_it_runs(
    call: Call, layouts: tuple[Layout, ...], decision: Decision, rehearsal: Rehearsal
) -> Decision:
    parts = [name for name in dict.fromkeys(rehearsal.parts) if name != call.op.name()]
    as_others = (
        f"no rule of its own; it runs as {', '.join(parts)}" if parts else "no rule of its own is needed"
    )
    reason = as_others if not rules_of(call.op) else "on the local tensors as they are"
    return replace(
        decision,
        inputs=layouts,
        outputs=rehearsal.outputs,
        reason=reason,
        fallback=rehearsal.fallback,
        cost_bytes=rehearsal.bytes,
    )


def _overloads(
    op: torch._ops.OpOverload | torch._ops.OpOverloadPacket | str,
) -> tuple[torch._ops.OpOverload, ...]:
    """Those that may be meant, the likeliest first.

    Raises: RuleError: no such op.
    """
    if isinstance(op, torch._ops.OpOverload):
        return (op,)
    if isinstance(op, torch._ops.OpOverloadPacket):
        names = sorted(op.overloads(), key=lambda name: (name != "Tensor", name != "default"))
        return tuple(getattr(op, name) for name in names)
    if not issubclass(type(op), str):
        name = getattr(op, "__name__", repr(op))
        raise RuleError(f"{name} is no op: a function of torch may run several; write it like 'aten::mm'")
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    if packet is None:
        raise RuleError(f"there is no op {op!r}; write it like 'aten::mm' or 'aten::add.Tensor'")
    if overload and overload not in packet.overloads():
        raise RuleError(f"{namespace}::{name} has no overload {overload!r}; it has {_listed(packet)}")
    return _overloads(getattr(packet, overload) if overload else packet)


def _listed(packet: torch._ops.OpOverloadPacket) -> str:
    return ", ".join(packet.overloads())


def _taken(
    overloads: tuple[torch._ops.OpOverload, ...], operands: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[torch._ops.OpOverload, tuple[TensorInfo | None, ...]]:
    """The first overload that takes the operands, and what it returns.

    Raises: RuleError: what the likeliest says of them, where none takes them.
    """
    refusals: list[RuleError] = []
    for overload in overloads:
        try:
            return overload, _results(overload, operands, named)
        except RuleError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def _described(value: Any) -> Any:
    if isinstance(value, Layout):
        return TensorInfo(tuple(value.shape), tuple(value.stride), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_described(v) for v in value)
    return value


def _results(
    op: torch._ops.OpOverload, operands: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[TensorInfo | None, ...]:
    try:
        out = op(*map(_meta, operands), **{name: _meta(value) for name, value in named.items()})
    except NotImplementedError as error:
        raise RuleError(
            f"{op.name()} cannot be explained: torch tells the shape of its result from values alone; "
            "sw.trace() lists what a call sends"
        ) from error
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise RuleError(f"{op.name()} refuses these operands: {str(error).splitlines()[0]}") from error
    return tuple(
        TensorInfo(tuple(v.shape), tuple(v.stride()), v.dtype) if isinstance(v, torch.Tensor) else None
        for v in tree_flatten(out)[0]
    )


def _meta(value: Any) -> Any:
    if isinstance(value, Layout):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return [_meta(v) for v in value]
    return torch.device("meta") if isinstance(value, torch.device) else value
