"""Gradients come to the layouts of their parameters once, together, before an optimizer looks at them.

A gradient stays where its backward made it (pending, or cut otherwise than its parameter) as long as it is
added to. An optimizer reads it several times, beside a state that lies as the parameter does: each of those
ops would move it again, for itself and one tensor at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.layout.layout import Layout
from shardwright.tensor import finished_forms
from shardwright.tensor.dtensor import DTensor, read_gradient
from shardwright.tensor.move_many import move_operands_together
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import up_to_date, wrap

Gradient = tuple[DTensor, DTensor, Layout]
_Lent = tuple[DTensor, DTensor, DTensor, int]

_LENT = "_gradients_of_the_backward"


def bring_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """What every optimizer does first: torch calls it before each `step()`. `give_back` undoes it after.

    Parameters that compute as their local tensors are left alone: not every rank need have their gradients,
    and `GradientSynchronizer` asks. So are gradients that are differentiated themselves.

    Raises: ImplicitRedistributionError: inside `explicit()`, if anything would be sent; nothing is changed.
    Cost: what `redistribute_many` of the gradients costs; nothing for those that lie as their parameters do.
    """
    if torch.compiler.is_compiling():
        return
    with DisableTorchFunctionSubclass():
        away = [entry for group in optimizer.param_groups for entry in _away(group["params"])]
        if not away:
            return
        name = type(optimizer).__name__
        known = [_finished_before(name, gradient, layout) for _, gradient, layout in away]
        wanted = [(g, layout) for (_, g, layout), form in zip(away, known, strict=True) if form is None]
        moved = iter(move_operands_together(name, wanted, "gradients lie as their parameters do"))
        lent: list[_Lent] = []
        for (parameter, gradient, layout), form in zip(away, known, strict=True):
            brought = wrap(next(moved), spec_of(layout, gradient.device_mesh)) if form is None else form
            parameter.grad = brought
            lent.append((parameter, gradient, brought, brought._version))
    vars(optimizer)[_LENT] = lent


def give_back(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Put back the gradients as the backward left them: others may hold them, or views of them.

    Not where the step made new ones (a closure), or wrote into those that it got.
    """
    has_closure = any(map(callable, (*args, *kwargs.values())))
    keeps_writes = has_closure or _keeps_writes(optimizer)
    for parameter, gradient, brought, version in vars(optimizer).pop(_LENT, ()):
        if parameter.grad is brought and (brought._version == version or not keeps_writes):
            parameter.grad = gradient


def _keeps_writes(optimizer: torch.optim.Optimizer) -> bool:
    """Does a step leave something in gradients? Fused kernels say that they write, and unscale them only."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return not fused or getattr(optimizer, "grad_scale", None) is not None


def _finished_before(name: str, gradient: DTensor, layout: Layout) -> DTensor | None:
    """A copy of the form that was made for the gradient's norm, say."""
    form = finished_forms.known(gradient)
    if form is None or not form._spec.layout.is_placed_as(layout):
        return None
    finished_forms.taken(name, gradient, form)
    copied: DTensor = form.clone()  # type: ignore[assignment]
    return copied


def _away(parameters: list[Any]) -> list[Gradient]:
    """The parameters whose gradients lie elsewhere, with them and the layouts that these are to have."""
    found = []
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or parameter._spec.use is not None:
            continue
        gradient = read_gradient(parameter)
        if not isinstance(gradient, DTensor) or gradient._spec is parameter._spec or gradient.requires_grad:
            continue
        own, has = parameter._spec, gradient._spec
        if own.mesh is not has.mesh or own.layout.is_placed_as(has.layout):
            continue
        up_to_date(gradient)
        layout = has.layout.with_placements(own.layout.placements, order=own.layout.order_names)
        found.append((parameter, gradient, layout))
    return found
