"""The gradient of terms that a program declares: what `combine` says of each, where that is no plain sum.

A term of a sum has the gradient of the sum. That of a maximum, a product or a reduction of the program's own
depends on the other terms: the ranks show each other theirs in the backward, and each asks autograd what its
own did.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.functional import gather_rows
from shardwright.compat import axis_names
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending
from shardwright.placement.partial import Partial
from shardwright.tensor.autograd import adopted, differentiated
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_asked
from shardwright.tensor.spec import finished, spec_of

_WHY = "gradient of declared terms"
_EVEN = (Partial("sum"), Partial("avg"))  # whose terms all have one gradient


def is_declared(layout: Layout) -> bool:
    """Are there terms of anything but a sum?"""
    pairs = zip(layout.placements, layout.sizes, strict=True)
    return any(p.is_pending and n > 1 and p != Partial("sum") for p, n in pairs)


class FromTerms(torch.autograd.Function):
    """This rank's term -> DTensor. Backward: what the reduction makes of it, given those of the others."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
        """Keep the term, for its derivative may need it."""
        ctx.save_for_backward(local)
        ctx.layout, ctx.mesh = layout, mesh
        ctx.set_materialize_grads(False)
        return adopted(local, spec_of(layout, mesh))

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None, None]:
        """Finish the gradient of the value, and take what is this term's of it."""
        if grad is None:
            return None, None, None
        if differentiated(grad):
            raise RuleError(
                f"from_local: a second derivative of terms that were declared as {ctx.layout} is not taken\n"
                "  fix: compute the reduction on DTensors, which says its own"
            )
        target = finished(ctx.layout)
        found = grad._spec.layout.with_placements(target.placements, order=target.order_names)
        whole = move_asked(grad, found, reason=_WHY)
        return _of_own_term(ctx.saved_tensors[0], ctx.layout, ctx.mesh, whole), None, None


def _of_own_term(local: torch.Tensor, layout: Layout, mesh: DeviceMesh, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of the local term, by that of the value."""
    pending = [(axis, p) for axis, p in enumerate(layout.placements) if p.is_pending and mesh.size(axis) > 1]
    if all(p in _EVEN for _, p in pending):
        ranks = prod(mesh.size(axis) for axis, p in pending if p == Partial("avg"))
        return grad / ranks if ranks > 1 else grad
    term = local.detach().requires_grad_()
    with torch.enable_grad():
        value = term.clone()  # a reduction of one's own may give it back, or write into it
        for axis, placement in reversed(pending):
            value = cast("Pending", placement).combine(_shown(value, mesh, axis))
    if not value.requires_grad:
        kinds = ", ".join(str(p) for p in layout.placements if p.is_pending)
        raise RuleError(
            f"from_local: the combine of {kinds} is not differentiable by autograd, so that its terms have "
            "no gradient\n  fix: detach the terms, or write combine with torch's functions of new results"
        )
    (found,) = torch.autograd.grad(
        value, term, grad.to(value.dtype), allow_unused=True, materialize_grads=True
    )
    return found


def _shown(own: torch.Tensor, mesh: DeviceMesh, axis: int) -> list[torch.Tensor]:
    """The terms of all ranks along an axis, this rank's with its graph.

    Those of the others have one too: whether the value can be differentiated is the same question everywhere,
    also where it does not depend on this term.
    """
    sent, name = own.detach().reshape(-1), axis_names(mesh)[axis]
    sizes = [sent.numel()] * mesh.size(axis)
    told = gather_rows(sent, sizes, mesh.get_group(axis), axis=name, reason=_WHY)
    rows = told.detach().requires_grad_().clone().view(len(sizes), *own.shape)  # which may be written into
    parts = [rows[at] for at in range(len(sizes))]
    parts[mesh.get_local_rank(axis)] = own
    return parts
