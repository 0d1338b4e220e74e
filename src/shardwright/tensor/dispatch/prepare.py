"""Deciding a call once: metadata of the results, the rule, the layouts, the local arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import is_composite, tree_leaves
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.rules import registry
from shardwright.rules.algorithms.algorithm import algorithm_for
from shardwright.rules.any_size import AnySize
from shardwright.rules.call import Call
from shardwright.rules.formula import LocalForm
from shardwright.rules.propagate import Decision, propagate
from shardwright.tensor.dispatch.kernels import kernel_of
from shardwright.tensor.dispatch.metadata import DataDependentError, described, result_infos
from shardwright.tensor.dispatch.one_mesh import on_one_mesh
from shardwright.tensor.dispatch.ways.algorithm import ByAlgorithm, may_write
from shardwright.tensor.dispatch.ways.fresh_results import fresh
from shardwright.tensor.dispatch.ways.out import functional_form, out_names, resized_first, written_from
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.boundary import helpers
from shardwright.tensor.spec import LocalUse, Spec, common_use, coords_of, spec_of
from shardwright.tensor.views.take import ViewCall, cuts_through, view_call
from shardwright.views.aten import gives_back, is_described, on_elements, undoes, views_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Move:
    """One operand must have another layout before the local call."""

    operand: int
    target: Layout


@dataclass(frozen=True, slots=True)
class Return:
    """What the local call wrote of one operand has another layout than the operand, and goes back to that."""

    operand: int
    held: Layout


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
    any_size: AnySize | None = None  # the same call on tensors of other sizes
    simple: bool = False  # found after the first run: see `run.is_simple`


@dataclass(frozen=True, slots=True)
class NeedsDecomposition:
    """No rule for the op itself, but for the ops that it consists of."""

    function: Any

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The same value from other ops, each dispatched on its own.

        Tensors that the steps make of their own are the same on every rank.
        """
        with helpers():
            return self.function(*args, **kwargs)


def prepare(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[DTensor]
) -> Prepared | NeedsDecomposition | ByAlgorithm | ViewCall:
    """Decide the call; raises what the single-device op raises for these shapes, or RuleError."""
    if _is_of_an_undefined_gradient(func, args):
        return NeedsDecomposition(partial(_undefined, func))
    elsewhere = on_one_mesh(func, args, kwargs, tensors)
    if elsewhere is not None:
        return NeedsDecomposition(elsewhere)
    steps = _decomposition(func) or _with_out_of_another_size(func, args, kwargs)
    if steps is not None:
        return steps
    prepared = prepare_call(func, args, kwargs, tensors)
    whole = isinstance(prepared, Prepared) and prepared.fallback
    return (_by_functional_form(func) if whole else None) or prepared


def _is_of_an_undefined_gradient(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Does autograd ask for the derivative of what nobody used? Its functions without data do not know."""
    first = func._schema.arguments[0] if args else None
    return first is not None and args[0] is None and isinstance(first.type, torch.TensorType)


def _undefined(func: torch._ops.OpOverload, *_args: Any, **_kwargs: Any) -> Any:
    """What the kernels give then, on a rank without elements too."""
    made = (None,) * len(func._schema.returns)
    return made[0] if len(made) == 1 else made


def prepare_call(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[DTensor]
) -> Prepared | ByAlgorithm | ViewCall:
    """Decide the call of this very op, without a look at simpler ones that it may consist of."""
    mesh = tensors[0].device_mesh
    use = common_use(tensors)
    known = described(args), tuple(zip(kwargs, described(tuple(kwargs.values())), strict=True))
    if not registry.rules_of(func) and coords_of(mesh) is not None:
        return _gathered(Call(func, *known, ()), tensors, "no rule; every operand is made whole")
    try:
        infos = result_infos(func, args, kwargs)
    except DataDependentError:
        reason = f"{func.name()}: the shape of its result depends on the data"
        return _gathered(Call(func, *known, ()), tensors, reason)
    call = Call(func, *known, infos)
    layouts = tuple(t._spec.layout for t in tensors)
    chains = views_of(call) if is_described(func) else None
    if chains is not None and not on_elements(func) and cuts_through(chains[0][0], layouts[0]):
        view = view_call(func, call, chains, layouts[0], mesh, use)
        if view is not None:
            return view
    decision = propagate(call, layouts)
    if decision.inputs != layouts and chains is not None and not _changes_terms(func, decision, layouts[0]):
        view = view_call(func, call, chains, layouts[0], mesh, use)
        if view is not None:
            return view
    chosen = algorithm_for(call, layouts, decision) if may_write(func) else None
    if chosen is not None:
        return ByAlgorithm(call, chosen, decision.reason)
    return _settled(func, call, decision, tensors, mesh, use)


def _changes_terms(func: torch._ops.OpOverload, decision: Decision, layout: Layout) -> bool:
    """Whether the op makes other elements of pending ones: the least of complex numbers is not there."""
    made = decision.outputs[0] if on_elements(func) else None
    return made is not None and any(made.placements[i] != layout.placements[i] for i in layout.pending_axes)


def _decomposition(func: torch._ops.OpOverload) -> NeedsDecomposition | None:
    """Simpler ops that an op without a rule consists of; of one that writes, the form that does not."""
    if registry.rules_of(func):
        return None
    if is_composite(func):
        return NeedsDecomposition(func.decompose)
    function = registry.fallback_decomposition(func)
    return _by_functional_form(func) if function is None else NeedsDecomposition(fresh(func, function))


def _with_out_of_another_size(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> NeedsDecomposition | None:
    """`out=` that has another size than the result gets that size first; where data decide it, after."""
    names = out_names(func)
    if not names:
        return None
    try:
        infos = result_infos(func, args, kwargs)
    except DataDependentError:
        functional = functional_form(func)
        return None if functional is None else NeedsDecomposition(written_from(func, functional))
    targets = tree_leaves([kwargs[name] for name in names])
    sizes = [info.shape for info in infos if info is not None]
    if len(sizes) != len(targets) or all(t.shape == s for t, s in zip(targets, sizes, strict=True)):
        return None
    return NeedsDecomposition(resized_first(func, sizes))


def _by_functional_form(func: torch._ops.OpOverload) -> NeedsDecomposition | None:
    functional = functional_form(func)
    if functional is not None and _is_known(functional):
        return NeedsDecomposition(written_from(func, functional))
    return None


def _is_known(func: torch._ops.OpOverload) -> bool:
    """Is there something better for the op than to make its operands whole?"""
    return bool(
        registry.rules_of(func)
        or registry.rewrite_of(func)
        or registry.fallback_decomposition(func)
        or is_composite(func)
    )


def _settled(
    func: torch._ops.OpOverload,
    call: Call,
    decision: Decision,
    tensors: list[DTensor],
    mesh: DeviceMesh,
    use: LocalUse | None,
) -> Prepared:
    coords = coords_of(mesh)
    moves = tuple(
        Move(i, want)
        for i, (want, t) in enumerate(zip(decision.inputs, tensors, strict=True))
        if want != t._spec.layout
    )
    mutated = tuple(i for i, o in enumerate(call.flat_operands) if o.mutated)
    written = _written(func, call)
    brought_back = tuple(_returns(mutated, written, decision, tensors))
    results = tuple(None if out is None else spec_of(out, mesh, use) for out in decision.outputs)
    overrides = decision.local_args(coords) if coords is not None else {}
    undone = call if _may_be_put_back(func, tensors, moves=bool(moves)) else None
    return Prepared(
        moves=moves,
        overrides=tuple((overrides or {}).items()),
        results=results,
        written=written,
        mutated=mutated,
        outs=tuple(i for i, operand in enumerate(call.flat_operands) if operand.out),
        brought_back=brought_back,
        skip=coords is None or _contributes_nothing(decision, coords),
        reason=decision.reason,
        fallback=decision.fallback,
        gather_all=False,
        local=_local_form(func, decision, coords) or kernel_of(func, {t.dtype for t in tensors}),
        any_size=None
        if coords is None or overrides or decision.local or undone or brought_back
        else decision.any_size,
        call=undone,
    )


def _returns(
    mutated: tuple[int, ...], written: tuple[int | None, ...], decision: Decision, tensors: list[DTensor]
) -> Iterator[Return]:
    """The written operands that the call leaves in another layout than they have.

    The call may need them in another one, or make another one of them: the largest part, negated in place,
    is the smallest.
    """
    for operand in mutated:
        held = decision.inputs[operand]
        if operand in written:
            made = decision.outputs[written.index(operand)]
            if made is not None and made.placements != held.placements:
                held = held.with_placements(made.placements, order=made.order_names)
        if held != tensors[operand]._spec.layout:
            yield Return(operand, held)


def _may_be_put_back(func: torch._ops.OpOverload, tensors: list[DTensor], *, moves: bool) -> bool:
    """Whether the call undoes views and `views.put_back` may know a better layout than the rules.

    A sum is the gradient of an expansion: the rules say it as well where each axis cuts one dim.
    """
    if not undoes(func) or not (moves or gives_back(func)):
        return False
    return func._schema.name != "aten::sum" or _mixes_dims(tensors[0]._spec.layout)


def _mixes_dims(layout: Layout) -> bool:
    """Whether axes cut together, or one of them several dims."""
    return any(
        len(step.axes) > 1 or len(step.partition.cut_dims(layout.shape, step.size)) > 1
        for step in layout.partitions
        if step.partition is not None
    )


def _local_form(
    func: torch._ops.OpOverload, decision: Decision, coords: tuple[int, ...] | None
) -> LocalForm | None:
    return None if decision.local is None or coords is None else decision.local.at(func, coords)


def _contributes_nothing(decision: Decision, coords: tuple[int, ...]) -> bool:
    """Does this rank hold nothing of what the op reads, and have no finished elements to make?

    `x.new_ones(3)` of an `x` that another rank owns is made by every rank all the same.
    """
    if decision.runs_empty or not _holds_nothing(decision.inputs, coords):
        return False
    finished = (out for out in decision.outputs if out is not None and not out.pending_axes)
    return not any(prod(out.local_shape(coords)) for out in finished)


def _holds_nothing(inputs: tuple[Layout, ...], coords: tuple[int, ...]) -> bool:
    """Does a cut leave this rank without elements of an operand that has some, or empty one dim more?

    A batch of no images is an argument to the op; images without channels are not.
    """
    return any(_emptied(layout, layout.local_shape(coords)) for layout in inputs)


def _emptied(layout: Layout, local: tuple[int, ...]) -> bool:
    if 0 not in local:
        return False
    return layout.numel > 0 or any(own == 0 != size for own, size in zip(local, layout.shape, strict=False))


def _gathered(call: Call, tensors: list[DTensor], reason: str) -> Prepared:
    """Every operand whole: right for any deterministic op, and what comes out says what its shape is."""
    moves = tuple(Move(i, replicated_layout(t._spec.layout)) for i, t in enumerate(tensors))
    moves = tuple(m for m in moves if m.target != tensors[m.operand]._spec.layout)
    mutated = tuple(i for i, o in enumerate(call.flat_operands) if o.mutated)
    return Prepared(
        moves=moves,
        overrides=(),
        results=(),
        written=_written(call.op, call),
        mutated=mutated,
        brought_back=tuple(Return(m.operand, m.target) for m in moves if m.operand in mutated),
        skip=False,
        reason=reason,
        fallback=True,
        gather_all=True,
        local=kernel_of(call.op, {t.dtype for t in tensors}),
    )


def replicated_layout(layout: Layout) -> Layout:
    """The same tensor, whole and finished on every rank."""
    return layout.with_placements((Replicate(),) * len(layout.placements))


def _written(func: torch._ops.OpOverload, call: Call) -> tuple[int | None, ...]:
    """Per tensor result: the operand whose storage it is, for in-place and out= calls."""
    sets = {}
    for index, operand in enumerate(call.flat_operands):
        argument = next(a for a in func._schema.arguments if a.name == operand.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            for name in argument.alias_info.before_set:
                sets[name] = index
    found: list[int | None] = []
    for result in func._schema.returns:
        alias = result.alias_info
        names = alias.before_set if alias is not None and alias.is_write else ()
        found.append(next((sets[name] for name in names if name in sets), None))
    return tuple(found)
