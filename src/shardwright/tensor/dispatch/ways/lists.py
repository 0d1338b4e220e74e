"""`_foreach_*` and `_fused_*`: one call on the lists of local tensors where that is what each position does.

What each position does is decided by the rules of its own op, as for a tensor alone. Where one of them moves
something, or makes another call than the op on its local tensors, the positions are run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import tree_leaves, tree_map_only
from shardwright.remember import memo
from shardwright.rules import registry
from shardwright.tensor import finished_forms
from shardwright.tensor.dispatch import written_memory
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.kernels import is_linear, kernel_of
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dispatch.refuse import refuse_implicit
from shardwright.tensor.dispatch.run import check_simple, run
from shardwright.tensor.dispatch.ways.list_elements import ElementCall, element_calls, list_arguments
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import is_explicit
from shardwright.tensor.plain.boundary import helpers_allowed
from shardwright.tensor.plain.replicated import replicate_plain
from shardwright.tensor.spec import Spec
from shardwright.tensor.views.write_back import written_by
from shardwright.tensor.wrap import as_ours, wrap

_MANY = 4096
Decide = Callable[[Asked], Any]

# Per call: what was decided.
_known: dict[tuple[Any, ...], _Decided] = memo("calls on lists", {})


def takes_lists(func: torch._ops.OpOverload) -> bool:
    """Is it one of these ops? Not every fused op is: `_fused_rms_norm` takes one tensor, and has a rule."""
    return bool(list_arguments(func))


def run_on_lists(
    decide: Decide, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """A list op on DTensors.

    Args: decide: how the op for one element is run: the table of ways, in which lists are one.
    Raises: RuleError: what the op for one element raises for a position.
    Cost: what the op for one element costs at each position; nothing where each is one local call.
    """
    args, kwargs = _each(args, as_ours), {name: _each(value, as_ours) for name, value in kwargs.items()}
    key = (helpers_allowed(), func, *_described((*args, *kwargs.items())))
    first = key not in _known
    if first:
        decided = _decided(decide, func, args, kwargs)
        if len(_known) >= _MANY:
            _known.clear()
        _known[key] = decided
    else:
        decided = _known[key]
    specs = decided.specs
    if specs is None or _may_overlap(func, args, kwargs):
        calls = element_calls(func, args, kwargs)
        if is_explicit():
            _refuse(decide, calls)
        if len(decided.finished) > 1:
            finished_forms.finish_together(func.name(), [_tensors(calls[i])[j] for i, j in decided.finished])
        out = [_run_alone(decide, call) for call in calls]
    else:
        out = _call(func, args, kwargs, specs)
        if first:
            _check(func, specs, out)
    _raise_versions(func, args, kwargs)
    return out if func._schema.returns else None


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of every DTensor; torch's trees would cost more, for every parameter at every step."""
    if isinstance(value, TorchDTensor):
        return change(value)
    return [_each(v, change) for v in value] if isinstance(value, list | tuple) else value


def _local(x: DTensor) -> torch.Tensor:
    return x._local_tensor


def _described(values: Sequence[Any]) -> Iterator[Any]:
    """What the decision depends on, flat; `1`, `1.0` and `True` must not look alike."""
    for value in values:
        if isinstance(value, DTensor):
            yield value._spec.token
        elif isinstance(value, torch.Tensor):
            yield value.shape
            yield value.dtype
        elif isinstance(value, list | tuple):
            yield len(value)
            yield from _described(value)
        else:
            yield value.__class__
            yield value


# ---------------------------------------------------------------------------------------- the decision


@dataclass(frozen=True, slots=True)
class _Decided:
    """How a call on lists is run.

    specs: of the results, if every position is the op on its local tensors; else None.
    finished: the operands that are pending and that positions read finished, by position and number.
    """

    specs: list[Spec | None] | None
    finished: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Alone:
    """One position with its tensors all distributed, and how its call is run."""

    call: ElementCall
    tensors: list[DTensor]
    prepared: Any


def _decided(
    decide: Decide, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Decided:
    found: list[Spec | None] = []
    calls = element_calls(func, args, kwargs)
    positions = [_prepared(decide, call) for call in calls]
    if not all(alone is None or _is_local(func, alone.prepared) for alone in positions):
        return _Decided(None, tuple(_finished(calls, positions)))
    if any(written_memory.is_expanded(x) for x in written_by(func, args, kwargs)):
        return _Decided(None)
    for alone in positions:
        found += (None,) if alone is None else alone.prepared.results
    return _Decided(found)


def _finished(calls: Sequence[ElementCall], positions: Sequence[_Alone | None]) -> Iterator[tuple[int, int]]:
    for i, (call, alone) in enumerate(zip(calls, positions, strict=True)):
        if alone is None or not isinstance(alone.prepared, Prepared):
            continue
        own = list(map(id, _tensors(call)))
        for move in alone.prepared.moves:
            x = alone.tensors[move.operand]
            finished = finished_forms.finishes(x._spec.layout, move.target)
            if finished and id(x) in own and move.operand not in alone.prepared.mutated:
                yield i, own.index(id(x))


def _tensors(call: ElementCall) -> list[DTensor]:
    return [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, DTensor)]


def _is_local(func: torch._ops.OpOverload, prepared: Any) -> bool:
    """Whether the call is the op on the local tensors as they are."""
    if not isinstance(prepared, Prepared):
        return False
    instead = None if is_linear(func) else prepared.local
    another = prepared.moves or prepared.brought_back or prepared.overrides or instead
    return not (another or prepared.skip or prepared.gather_all)


def _prepared(decide: Decide, call: ElementCall) -> _Alone | None:
    """The decision for one position; None for plain tensors alone."""
    leaves = tree_leaves((call.args, call.kwargs))
    mesh = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
    if mesh is None:
        return None
    func: Any = call.op
    if not isinstance(func, torch._ops.OpOverload) or registry.rewrite_of(func) is not None:
        return _Alone(call, [], None)
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda x: x if isinstance(x, DTensor) else replicate_plain(x, mesh, func),
        (call.args, call.kwargs),
    )
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)]
    return _Alone(ElementCall(func, args, kwargs), tensors, decide(Asked(func, args, kwargs, tensors)))


# --------------------------------------------------------------------------------------------- running


def _refuse(decide: Decide, calls: Sequence[ElementCall]) -> None:
    """Raise for what any position would move, before one of them has run."""
    for alone in [_prepared(decide, call) for call in calls]:
        if alone is not None and isinstance(alone.prepared, Prepared):
            op: Any = alone.call.op
            refuse_implicit(op, alone.call.args, alone.call.kwargs, alone.prepared, alone.tensors)


def _run_alone(decide: Decide, call: ElementCall) -> Any:
    """One position: an ordinary call, but a fused step, which is no op of one tensor."""
    func: Any = call.op
    if not (isinstance(func, torch._ops.OpOverload) and takes_lists(func)):
        return call.run()
    alone = _prepared(decide, call)
    if alone is None:
        return call.run()
    return run(alone.prepared, func, alone.call.args, alone.call.kwargs, alone.tensors)


def _call(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    specs: Sequence[Spec | None],
) -> Any:
    """The list op on the local tensors."""
    named = {name: _each(value, _local) for name, value in kwargs.items()}
    out = (kernel_of(func, set()) or func)(*_each(args, _local), **named)
    if not isinstance(out, list | tuple):
        return out
    return [x if spec is None else wrap(x, spec) for x, spec in zip(out, specs, strict=True)]


def _check(func: torch._ops.OpOverload, specs: Sequence[Spec | None], out: Any) -> None:
    """The rules' promise, tested once. Raises: LayoutError: one of them is wrong."""
    for spec, x in zip(specs, out or (), strict=False):
        if spec is not None:
            check_simple(spec, func, x, ())


def _raise_versions(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """What was written is another value: a backward that saved the old one must notice.

    On plain tensors the op of each element does so; on DTensors it runs below where versions are counted. The
    fused steps raise no version on one device either.
    """
    if not func._schema.name.startswith("aten::_foreach_"):
        return
    written = [x for x in written_by(func, args, kwargs) if not x.is_inference()]
    torch.autograd.graph.increment_version(written)


def _may_overlap(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Is a view written beside another list? One device refuses some, when the position's turn has come.

    The local parts tell nothing: they may be copies, or empty.
    """
    if not func._schema.is_mutable or len(list_arguments(func)) == 1:
        return False
    return any(x._base is not None for x in written_by(func, args, kwargs))
