"""The rules' way: operands are brought to the layouts that an equation asks for, then one local call."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from shardwright.layout.layout import Layout
from shardwright.rules.call import aliases_of
from shardwright.rules.catalog.view_maps import gives_back, undoes
from shardwright.rules.formula import LocalForm
from shardwright.rules.propagate import Decision
from shardwright.tensor.dispatch import derived
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.kernels import kernel_of
from shardwright.tensor.dispatch.prepared import Move, Prepared, Return
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import spec_of


def by_rule(asked: Asked) -> Prepared:
    """The call as the rules decide it."""
    func, call, decision, tensors = asked.func, asked.call, asked.decision, asked.tensors
    mesh, use, coords = asked.mesh, asked.use, asked.coords
    moves = tuple(
        Move(i, want, bool(t._spec.layout.pending_axes))
        for i, (want, t) in enumerate(zip(decision.inputs, tensors, strict=True))
        if want != t._spec.layout
    )
    mutated = tuple(i for i, o in enumerate(call.flat_operands) if o.mutated)
    written = aliases_of(call)
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
        derived=derived.derivation_of(call, decision, moves=bool(moves)),
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
            if made is not None and not made.is_placed_as(held):
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
