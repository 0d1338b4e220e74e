"""Gradients come to the layouts of their parameters once, together, before an optimizer looks at them.

A gradient stays where its backward made it (pending, or cut otherwise than its parameter) as long as it is
added to. An optimizer reads it several times, beside a state that lies as the parameter does: each of those
ops would move it again, for itself and one tensor at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.tensor import finished_forms
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move_many import move_operands_together
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import up_to_date, wrap

if TYPE_CHECKING:
    from shardwright.layout.layout import Layout

    Gradient = tuple[DTensor, DTensor, Layout]


def bring_gradients(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """What every optimizer does first: torch calls it before each `step()`.

    Parameters that compute as their local tensors are left alone: not every rank need have their gradients,
    and `GradientSynchronizer` asks.

    Raises: ImplicitRedistributionError: inside `explicit()`, if anything would be sent; nothing is changed.
    Cost: what `redistribute_many` of the gradients costs; nothing for those that lie as their parameters do.
    """
    if torch.compiler.is_compiling():
        return
    with DisableTorchFunctionSubclass():
        away = [entry for group in optimizer.param_groups for entry in _away(group["params"])]
    if not away:
        return
    away = [entry for entry in away if not _takes_form(*entry)]
    wanted = [(gradient, layout) for _, gradient, layout in away]
    moved = move_operands_together(type(optimizer).__name__, wanted, "gradients lie as their parameters do")
    for (parameter, gradient, layout), local in zip(away, moved, strict=True):
        parameter.grad = wrap(local, spec_of(layout, gradient.device_mesh))


def _takes_form(parameter: DTensor, gradient: DTensor, layout: Layout) -> bool:
    """Was the gradient finished for its norm, say? Then that is the parameter's."""
    form = finished_forms.known(gradient)
    if form is None or form._spec.layout.placements != layout.placements:
        return False
    finished_forms.give_up(gradient)
    parameter.grad = form
    return True


def _away(parameters: list[Any]) -> list[Gradient]:
    """The parameters whose gradients lie elsewhere, with them and the layouts that these are to have."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if type(parameter) is not DTensor or not isinstance(gradient, DTensor):
            continue
        own, has = parameter._spec, gradient._spec
        if own.mesh is not has.mesh or own.layout.placements == has.layout.placements:
            continue
        up_to_date(gradient)
        layout = has.layout.with_placements(own.layout.placements, order=own.layout.order_names)
        found.append((parameter, gradient, layout))
    return found
