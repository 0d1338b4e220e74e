"""Gradients that torch makes of a size alone: zeros of no operand, so plain where the operand is a DTensor.

The derivative of `copysign` by its second operand, of `sgn`, of a repetition with no copies, of a list's
member of shape (0,) that a concatenation passes over: torch states
them as zeros of a shape, and nobody who sees DTensors is asked. Where such an op is called its operands pass
a point that lays these out as the operand's gradient. Every other op pays nothing.

Rejected: a mode around every backward (all its ops would pass it), and hooks on leaves (a user counts them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from shardwright.tensor import boundary
from shardwright.tensor.autograd import apply, finished
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_local
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_replicated, wrap

aten = torch.ops.aten


class _LaidOut(torch.autograd.Function):
    """The operand as it is. Backward: a plain gradient, the same on every rank, in the operand's layout."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.target = x.device_mesh, finished(x._spec.layout)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, DTensor):
            return grad
        whole = torch.zeros(grad.shape, dtype=grad.dtype) if grad._is_zerotensor() else grad
        placed = as_replicated(whole, ctx.mesh)
        target = placed._spec.layout.with_placements(ctx.target.placements, order=ctx.target.order_names)
        local = move_local(placed, target, reason="a gradient that torch makes of a size")
        return wrap(local, spec_of(target, ctx.mesh))


def _laid_out(x: DTensor) -> DTensor:
    return apply(_LaidOut, x) if x.requires_grad and torch.is_grad_enabled() else x


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(DTensor, _laid_out, (args, kwargs))
    return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place: what is written must stay what it is."""
    rest, kwargs = tree_map_only(DTensor, _laid_out, (args[1:], kwargs))
    return func(args[0], *rest, **kwargs)


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A concatenation passes over tensors of shape (0,)."""
    members = args[0] if args else ()
    if isinstance(members, list | tuple) and any(x.shape == (0,) for x in members):
        return _called(func, args, kwargs)
    return func(*args, **kwargs)


def _signed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`sgn_` of a real tensor is `sign_`, whose derivative is made of the gradient."""
    return func(*args, **kwargs) if args[0].is_complex() else args[0].sign_()


boundary.OWN.update(
    dict.fromkeys(
        (
            *(torch.copysign, torch.Tensor.copysign, torch.nextafter, torch.Tensor.nextafter),
            *(torch.sgn, torch.Tensor.sgn, torch.Tensor.repeat, torch.tile, torch.Tensor.tile, torch.normal),
            torch.nn.functional.linear_cross_entropy,
            *(aten.max_pool2d_with_indices_backward, aten.max_pool2d_with_indices_backward.default),
        ),
        _called,
    )
)
boundary.OWN.update(
    dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack), _joined)
)
boundary.OWN.update(dict.fromkeys((torch.Tensor.copysign_, torch.Tensor.nextafter_), _written))
boundary.OWN[torch.Tensor.sgn_] = _signed
