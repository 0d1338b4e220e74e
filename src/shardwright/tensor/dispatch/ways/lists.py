"""`_foreach_*` and `_fused_*`: one call on the lists of local tensors where that is what each position does.

What each position does is decided by the rules of its own op, as for a tensor alone. Where one of them moves
something, or makes another call than the op on its local tensors, the positions are run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import increment_versions, tree_leaves, tree_map_only
from shardwright.remember import memo
from shardwright.rules import registry
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_pointwise, list_arguments
from shardwright.tensor import explicit_mode, finished_forms
from shardwright.tensor.dispatch import short, written_memory
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.kernels import is_linear, kernel_of
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dispatch.refuse import refuse_implicit
from shardwright.tensor.dispatch.run import check_simple, run
from shardwright.tensor.dispatch.ways.list_arguments import Taken
from shardwright.tensor.dispatch.ways.list_elements import ElementCall, element_calls
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.boundary import helpers_allowed
from shardwright.tensor.plain.replicated import replicate_plain
from shardwright.tensor.spec import Spec, has_form
from shardwright.tensor.views.write_back import written_by, written_places
from shardwright.tensor.wrap import as_ours, wrap

_MANY = 4096
Decide = Callable[[Asked], Any]

# Per call: what was decided.
_known: dict[tuple[Any, ...], _Decided] = memo("calls on lists", {})


def run_on_lists(decide: Decide, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A list op on DTensors.

    Args: decide: how the op for one element is run: the table of ways, in which lists are one.
    Raises: RuleError: what the op for one element raises for a position.
    Cost: what the op for one element costs at each position; nothing where each is one local call.
    """
    taken = Taken((helpers_allowed(), torch.get_default_dtype(), func), args, kwargs)
    if taken.foreign:
        args, kwargs = tree_map_only(TorchDTensor, as_ours, (args, dict(kwargs)))
        return run_on_lists(decide, func, args, kwargs)
    decided, first = _known_or_decided(decide, func, args, kwargs, taken)
    written = written_by(func, args, kwargs)
    if decided.specs is None or _may_overlap(func, written):
        out = _each_alone(decide, decided, func, args, kwargs)
    else:
        out = _call(func, taken, decided.specs)
        if first:
            _check(func, decided.specs, out)
            if short.reader.there:
                _learn(func, args, kwargs, taken, decided)
    _raise_versions(func, written)
    return out if func._schema.returns else None


def _known_or_decided(
    decide: Decide, func: Op, args: Args, kwargs: Kwargs, taken: Taken
) -> tuple[_Decided, bool]:
    """What was decided for this call, and whether that was now."""
    key = tuple(taken.key)
    known = _known.get(key)
    if known is not None and known.by_numbers:
        key = (*key, *taken.numbers)
        known = _known.get(key)
    if known is not None:
        return known, False
    decided = _decided(decide, func, args, kwargs)
    _store(key, decided, taken)
    return decided, True


def _store(key: tuple[Any, ...], decided: _Decided, taken: Taken) -> None:
    if len(_known) >= _MANY:
        _known.clear()
        short.lists.clear()  # a call that is decided, and has no recipe, gets none any more
    if decided.by_numbers:
        _known[tuple(taken.key)] = decided
        key = (*taken.key, *taken.numbers)
    _known[key] = decided


def _each_alone(decide: Decide, decided: _Decided, func: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    """Position after position, what they read finished in one list before."""
    calls = element_calls(func, args, kwargs)
    if explicit_mode.here.explicit:
        _refuse(decide, calls)
    if len(decided.finished) > 1:
        finished_forms.finish_together(func.name(), [_tensors(calls[i])[j] for i, j in decided.finished])
    return [_run_alone(decide, call) for call in calls]


# ---------------------------------------------------------------------------------------- the decision


@dataclass(frozen=True, slots=True)
class _Decided:
    """How a call on lists is run.

    specs: of the results, if every position is the op on its local tensors; else None.
    finished: the operands that are pending and that positions read finished, by position and number.
    by_numbers: it holds for these numbers only.
    """

    specs: list[Spec | None] | None
    finished: tuple[tuple[int, int], ...] = ()
    by_numbers: bool = False


@dataclass(frozen=True, slots=True)
class _Alone:
    """One position with its tensors all distributed, and how its call is run."""

    call: ElementCall
    tensors: list[DTensor]
    prepared: Any


def _decided(decide: Decide, func: Op, args: Args, kwargs: Kwargs) -> _Decided:
    calls = element_calls(func, args, kwargs)
    by_numbers = not all(map(_serves_all_numbers, calls))
    decide = _once_for_each(decide, by_numbers=by_numbers)
    positions = [_prepared(decide, call) for call in calls]
    if not all(alone is None or _is_local(func, alone.prepared) for alone in positions):
        return _Decided(None, tuple(_finished(calls, positions)), by_numbers)
    if any(written_memory.is_expanded(x) for x in written_by(func, args, kwargs)):
        return _Decided(None, (), by_numbers)
    found: list[Spec | None] = []
    for alone in positions:
        found += (None,) if alone is None else alone.prepared.results
    return _Decided(found, (), by_numbers)


def _once_for_each(decide: Decide, *, by_numbers: bool) -> Decide:
    """Positions that differ in nothing that matters are decided once."""
    made: dict[tuple[Any, ...], Any] = {}

    def decided(asked: Asked) -> Any:
        taken = Taken((asked.func,), asked.args, asked.kwargs)
        key = (*taken.key, *taken.numbers) if by_numbers else tuple(taken.key)
        if key not in made:
            made[key] = decide(asked)
        return made[key]

    return decided


def _serves_all_numbers(call: ElementCall) -> bool:
    """Is the decision the same whatever the numbers are? A factor below 0 makes a largest value the least."""
    func: Any = call.op
    if not isinstance(func, torch._ops.OpOverload) or any(x._spec.pending for x in _tensors(call)):
        return False
    return bool(list_arguments(func)) or is_pointwise(func)


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


def _is_local(func: Op, prepared: Any) -> bool:
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
    if not (isinstance(func, torch._ops.OpOverload) and list_arguments(func)):
        return call.run()
    alone = _prepared(decide, call)
    if alone is None:
        return call.run()
    return run(alone.prepared, func, alone.call.args, alone.call.kwargs, alone.tensors)


def _call(func: Op, taken: Taken, specs: Sequence[Spec | None]) -> Any:
    """The list op on the local tensors."""
    out = (kernel_of(func, set()) or func)(*taken.args, **taken.kwargs)
    if not isinstance(out, list | tuple):
        return out
    return [x if spec is None else wrap(x, spec) for x, spec in zip(out, specs, strict=True)]


def _check(func: Op, specs: Sequence[Spec | None], out: Any) -> None:
    """The rules' promise, tested once. Raises: LayoutError: one of them is wrong."""
    for spec, x in zip(specs, out or (), strict=False):
        if spec is not None:
            check_simple(spec, func, x, ())


def _learn(func: Op, args: Args, kwargs: Kwargs, taken: Taken, decided: _Decided) -> None:
    """Write down for C how this call was run, if nothing else is asked when it is run again."""
    specs = decided.specs
    operands = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, DTensor)]
    written = written_by(func, args, kwargs)
    if specs is None or has_form(operands) or short.by_default_dtype(operands, specs):
        return
    if written_memory.asks_of(func, written) or (kernel_of(func, set()) and not is_linear(func)):
        return
    if func._schema.returns and written:
        return
    results = tuple(specs) if func._schema.returns else None
    is_counted = func._schema.name.startswith("aten::_foreach_")
    several = bool(written) and len(list_arguments(func)) > 1
    writes = tuple(_stretches(func, args, kwargs))
    found = short.ShortList(func._op, results, writes, several, is_counted, is_linear(func))
    helpers = taken.key[:1] if taken.plain else ()
    numbers = taken.numbers if decided.by_numbers else None
    short.learn_list(func, (*taken.key[3:], *helpers), numbers, found)


def _stretches(func: Op, args: Args, kwargs: Kwargs) -> Iterator[tuple[int, int]]:
    """Which operands are written, from one up to another.

    Told by the arguments in which they stand, for what is read may be what is written.
    """
    written = {name for _, name in written_places(func)}
    names = [argument.name for argument in func._schema.arguments]
    first = end = 0
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        length = sum(isinstance(x, DTensor) for x in tree_leaves(value))
        if name in written:
            end += length
            continue
        if first < end:
            yield first, end
        first = end = end + length
    if first < end:
        yield first, end


def _raise_versions(func: Op, written: Sequence[DTensor]) -> None:
    """What was written is another value: a backward that saved the old one must notice.

    On plain tensors the op of each element does so; on DTensors it runs below where versions are counted. The
    fused steps raise no version on one device either.
    """
    if func._schema.name.startswith("aten::_foreach_"):
        increment_versions(written)


def _may_overlap(func: Op, written: Sequence[DTensor]) -> bool:
    """Is a view written beside another list? One device refuses some, when the position's turn has come.

    The local parts tell nothing: they may be copies, or empty.
    """
    return len(list_arguments(func)) > 1 and any(x._base is not None for x in written)
