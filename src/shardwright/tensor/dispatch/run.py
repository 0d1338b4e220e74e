"""Running a prepared call: move, call on the local tensors, wrap. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from shardwright.compat import tree_leaves, tree_map
from shardwright.compat.graph_order import made_of, noted_as_written, nothing_of
from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.identity import identity_of, reduction_of_cuts
from shardwright.rules.op import is_view
from shardwright.tensor import finished_forms
from shardwright.tensor.dispatch import derived
from shardwright.tensor.dispatch.memory_order import LAYS, as_made, lies_as_said
from shardwright.tensor.dispatch.prepared import Move, Prepared
from shardwright.tensor.dispatch.refuse import refuse_implicit
from shardwright.tensor.dispatch.written_memory import keep_apart
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.finished_forms import finishes, may_keep
from shardwright.tensor.move import move_operands, move_unasked
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import as_replicated, common_use, wrap
from shardwright.views.local import noted_as

_local_of = attrgetter("_local_tensor")


def run(prepared: Prepared, func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor]) -> Any:
    """The op's result as DTensors; operands that are written come back as the objects that were given."""
    locals_ = list(map(_local_of, tensors))
    if prepared.moves or prepared.brought_back:
        move_operands_of(prepared, func, args, kwargs, tensors, locals_)
        for back in prepared.brought_back:
            locals_[back.operand] = _repeating(tensors[back.operand], locals_[back.operand])
        if func._schema.name in LAYS:
            locals_ = list(map(LAYS[func._schema.name], locals_, tensors))
    if prepared.mutated and len(locals_) > 1:
        keep_apart(func, locals_, prepared.mutated)
    if prepared.skip:
        out = _nothing(prepared, func, kwargs.get("device"), tensors, locals_)
        _write_nothing(prepared, out, locals_)
    else:
        local_args, local_kwargs = local_call(prepared, func, args, kwargs, locals_)
        out = (prepared.local or func)(*local_args, **local_kwargs)
    for back in prepared.brought_back:
        _bring_back(func, tensors[back.operand], back.held, locals_[back.operand])
    if prepared.gather_all:
        return _wrap_replicated(prepared, out, tensors)
    if not prepared.checked:
        _check(prepared, func, out, all(map(lies_as_said, locals_, tensors)))
    wrapped = wrap_results(prepared, out, tensors)
    if prepared.derived is not None:
        derived.remember(wrapped, prepared.derived, func, args, kwargs, tensors)
    return wrapped


def run_simple(spec: Spec, func: Op, args: Args) -> DTensor:
    """`run` for a call that `is_simple`: one local call, one new tensor of this spec."""
    # `_op` is what calling the overload calls: without that frame a call costs a tenth less
    given = list(args)
    for place, value in enumerate(args):
        if isinstance(value, DTensor):
            given[place] = value._local_tensor
    return wrap(func._op(*given), spec)


def check_simple(spec: Spec, func: Op, out: DTensor, tensors: Iterable[DTensor]) -> None:
    """That the local result has the shape that its spec gives this rank.

    Raises: LayoutError: a rule is wrong. Never a wrong value in silence.
    """
    local = out._local_tensor.shape
    for tensor in tensors:
        if tensor._spec is spec and tensor._local_tensor.shape == local:
            return
    _check_shape(spec, func, out._local_tensor, "as for other sizes")


def is_simple(prepared: Prepared, out: Any, tensors: int, args: Args, kwargs: Kwargs) -> bool:
    """Whether nothing moves or is overridden, and neither arguments nor result are lists of tensors.

    Decided once the call has run in the ordinary way, which checks the local shapes.
    """
    return (
        prepared.checked
        and isinstance(out, DTensor)
        and not (prepared.moves or prepared.overrides or prepared.skip or prepared.local or kwargs)
        and prepared.written == (None,)
        and prepared.derived is None
        and prepared.results[0] is not None
        and sum(isinstance(value, DTensor) for value in args) == tensors
    )


def only_finishes(prepared: Prepared, tensors: Sequence[DTensor]) -> bool:
    """Do its moves finish what is pending, each of the operands that are, and no more?"""
    finished = {m.operand for m in prepared.moves if finishes(tensors[m.operand]._spec.layout, m.target)}
    return len(finished) == len(prepared.moves) == sum(x._spec.pending for x in tensors)


def move_operands_of(
    prepared: Prepared,
    func: Op,
    args: Args,
    kwargs: Kwargs,
    tensors: list[DTensor],
    locals_: list[torch.Tensor],
) -> None:
    """Put the operands of a call that must move where they must be."""
    wanted: list[tuple[DTensor, Layout]] = []  # each once: an operand may stand in two places
    kept: dict[int, DTensor] = {}  # by operand: what is finished for it, and for those that come after it
    moves = []
    refuse = partial(refuse_implicit, func, args, kwargs, prepared, tensors)
    for move in prepared.moves:
        x = tensors[move.operand]
        reads = move.operand not in prepared.mutated and not is_view(func)  # and gives tensors of their own
        if move.of_terms and reads and may_keep(x):
            form = _form_of(prepared, func, x, move, refuse)
            if form is not None and form._spec.layout.is_placed_as(move.target):
                locals_[move.operand] = form._local_tensor
                continue
            if form is not None:
                x = form
            elif finishes(x._spec.shown.layout, move.target):
                x = kept[move.operand] = finished_forms.subject(x)
        target = finished_forms.finished_layout(x._spec.shown.layout) if move.operand in kept else move.target
        same = [i for i, (other, to) in enumerate(wanted) if other is x and to == target] if wanted else ()
        moves.append((move, same[0] if same else len(wanted)))
        wanted += () if same else ((x, target),)
    if not moves:
        return
    kind = "fallback" if prepared.fallback else "redistribute"
    moved = move_operands(func.name(), wanted, prepared.reason, refuse=refuse, kind=kind)
    for move, place in moves:
        x, of, local = tensors[move.operand], kept.get(move.operand), moved[place]
        locals_[move.operand] = local if of is None else finished_forms.finished_from(x, of, local)


def _form_of(
    prepared: Prepared, func: Op, x: DTensor, move: Move, refuse: Callable[[], None]
) -> DTensor | None:
    """The finished form of an operand that moves, if it is kept or costs little."""
    form = derived.finished(func.name(), x, prepared.reason, refuse)
    if form is None and finishes(x._spec.shown.layout, move.target):
        form = finished_forms.known(x)
        if form is not None and form._spec.layout.is_placed_as(move.target):
            finished_forms.taken(func.name(), x, form)
    return form


def reads_finished(prepared: Prepared, func: Op, tensors: Sequence[DTensor], move: Move) -> bool:
    """Was what the call would finish finished under another name, and is it only read? It asks for it now."""
    x = tensors[move.operand]
    is_written = any(tensors[operand] is x for operand in prepared.mutated)
    return not is_written and not is_view(func) and finished_forms.takes_over(x)


def _bring_back(func: Op, written: DTensor, held: Layout, local: torch.Tensor) -> None:
    """The call left what it wrote in another layout: the tensor that was given gets the values."""
    changed = wrap(local, spec_of(held, written.device_mesh))
    back = move_unasked(func.name(), changed, written._spec.layout, "written in place")
    repeated = _repeated(written)
    _once(written._local_tensor, repeated).copy_(_once(back, repeated))


def _repeated(x: DTensor) -> list[int]:
    """The dims along which its elements are one place."""
    return [dim for dim, (size, s) in enumerate(zip(x.shape, x.stride(), strict=True)) if size > 1 and not s]


def _once(local: torch.Tensor, repeated: Sequence[int]) -> torch.Tensor:
    for dim in repeated:
        local = local.narrow(dim, 0, min(1, local.shape[dim]))
    return local


def _repeating(written: DTensor, local: torch.Tensor) -> torch.Tensor:
    """What moved, with elements in one place where the written ones are: the kernel writes all of them."""
    repeated = _repeated(written)
    return _once(local, repeated).expand(local.shape) if repeated else local


def local_call(
    prepared: Prepared, func: Op, args: Args, kwargs: Kwargs, locals_: list[torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the local call: local tensors for tensors, overridden sizes for sizes."""
    remaining = iter(locals_)
    local_args, local_kwargs = list(args), dict(kwargs)
    for place, value in enumerate(args):
        if isinstance(value, DTensor):
            local_args[place] = next(remaining)
        elif isinstance(value, list | tuple):
            local_args[place] = _substitute(value, remaining)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor | list | tuple):
            local_kwargs[name] = _substitute(value, remaining)
    if prepared.overrides:
        positions = {a.name: i for i, a in enumerate(func._schema.arguments)}
        for name, value in prepared.overrides:
            position = positions[name]
            if position < len(local_args):
                local_args[position] = value
            else:
                local_kwargs[name] = value
    return local_args, local_kwargs


def _substitute(value: Any, remaining: Any) -> Any:
    if isinstance(value, DTensor):
        return next(remaining)
    if isinstance(value, list | tuple):
        return [_substitute(v, remaining) for v in value]
    return value


def wrap_results(prepared: Prepared, out: Any, tensors: list[DTensor]) -> Any:
    """What the local call gave as the results; what it wrote as the operands that were given."""
    specs, written = prepared.results, prepared.written
    if isinstance(out, torch.Tensor):
        if written[0] is not None:
            return tensors[written[0]]
        spec = specs[0]
        return out if spec is None else wrap(out, spec)
    if out is None:
        return None
    flat = tree_leaves(out)
    per_return = written if len(written) == len(flat) else (None,) * len(flat)
    wrapped = [
        value
        if spec is None or not isinstance(value, torch.Tensor)
        else (tensors[w] if w is not None else wrap(value, spec))
        for value, spec, w in zip(flat, specs, per_return, strict=True)
    ]
    return _in_place_of(wrapped, out)


def _in_place_of(leaves: Iterable[Any], out: Any) -> Any:
    """What the local call gave, with these in place of its tensors."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), out)


def _check(prepared: Prepared, func: Op, out: Any, as_said: bool) -> None:
    """The law that a rule promised: local results have the shapes that the layouts give this rank.

    New results get the strides that the kernel gave them, unless operands lay otherwise than they say: for
    later ones that lie as they say, the check is made again.

    Raises: LayoutError: a rule is wrong. Never a wrong value in silence.
    """
    results = list(prepared.results)
    flat = tree_leaves(out)
    is_new = [as_said and returned.alias_info is None for returned in func._schema.returns]
    for place, (local, spec) in enumerate(zip(flat, prepared.results, strict=False)):
        if spec is not None and isinstance(local, torch.Tensor):
            _check_shape(spec, func, local, prepared.reason)
            if local.stride() != spec.layout.stride and len(is_new) == len(flat) and is_new[place]:
                results[place] = as_made(spec, local)
    prepared.results = tuple(results)
    prepared.checked = as_said


def _check_shape(spec: Spec, func: Op, local: torch.Tensor, reason: str) -> None:
    coords = spec.coords
    if coords is None:
        return
    expected = tuple(spec.layout.local_shape(coords))
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"{func.name()}: the rule ({reason}) gave {spec.layout}, whose part on {coords} has "
            f"shape {expected}, but the local result has {tuple(local.shape)}: the rule is wrong"
        )


def _nothing(
    prepared: Prepared, func: Op, device: Any, tensors: list[DTensor], locals_: list[torch.Tensor]
) -> Any:
    """What a rank contributes that holds nothing: an empty part, or the identity of the reduction.

    device: that the program asked for.
    """
    layouts = [x._spec.layout for x in tensors]
    for move in prepared.moves:
        layouts[move.operand] = move.target
    seen = func if is_view(func) else None
    made = [_identity(spec, layouts, locals_, device, seen=seen) for spec in prepared.results]
    if not made:
        return None
    if _returns_a_list(func):
        return made
    return made[0] if len(made) == 1 else tuple(made)


# Views that note something of elements, and change none.
_NOTES = frozenset({torch.ops.aten._conj.default, torch.ops.aten._neg_view.default})


def _returns_a_list(func: Op) -> bool:
    """One list of tensors, which may well hold a single one."""
    returns = func._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def _write_nothing(prepared: Prepared, made: Any, locals_: list[torch.Tensor]) -> None:
    """`out=` operands hold what the results hold, on a rank without elements too: the identity."""
    for place in prepared.mutated:
        noted_as_written(locals_[place])
    results = made if isinstance(made, tuple | list) else (made,)
    for operand, result in zip(prepared.written, results, strict=False):
        if operand in prepared.outs and isinstance(result, torch.Tensor):
            locals_[operand].copy_(result)


def _identity(
    spec: Spec | None, inputs: list[Layout], locals_: list[torch.Tensor], device: Any, *, seen: Op | None
) -> torch.Tensor | None:
    """seen: the op, if it is a view."""
    if spec is None:
        return None
    coords = spec.coords
    layout: Layout = spec.layout
    shape = layout.local_shape(coords) if coords is not None else (0,)
    if seen is not None and layout.dtype == locals_[0].dtype:  # what is written there goes to the operand
        nothing = noted_as(locals_[0], nothing_of(locals_[0], shape))
        return seen(nothing) if seen in _NOTES else nothing
    local = locals_[0].new_empty(tuple(shape), dtype=layout.dtype, device=device)  # fake where that is
    if local.numel():
        pending = reduction_of_cuts(layout, inputs)
        local.fill_(identity_of(pending, layout.dtype) if pending else 0)
    return made_of(local, *locals_)  # as on other ranks: torch parts forward and backward by that


def _wrap_replicated(prepared: Prepared, out: Any, tensors: list[DTensor]) -> Any:
    """What whole operands gave, as it is: no kernel without data had to foresee it."""
    flat = tree_leaves(out)
    mesh, use = tensors[0].device_mesh, common_use(tensors)
    written = prepared.written if len(prepared.written) == len(flat) else (None,) * len(flat)
    wrapped = [
        value
        if not isinstance(value, torch.Tensor)
        else (tensors[w] if w is not None else as_replicated(value, mesh, use))
        for value, w in zip(flat, written, strict=True)
    ]
    return _in_place_of(wrapped, out)
