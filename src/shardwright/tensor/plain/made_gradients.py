"""Gradients that torch makes of a size alone: zeros of no operand, so plain where the operand is a DTensor.

The derivative of `copysign` by its second operand, of `sgn`, of a comparison in place, of a repetition with
no copies, of a list's member of shape (0,) that a concatenation passes over, the second derivative of pools
and paddings: torch states them as zeros of a shape (`zeros_like(self)` in its derivatives.yaml), and nobody
who sees DTensors is asked. Where such an op is called its operands pass a point that lays these out as the
operand's gradient. Every other op pays nothing.

Rejected: a mode around every backward (all its ops would pass it), and hooks on leaves (a user counts them).
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.compat import nn_functions, pad_kernel, preserve_version_counter, tree_map_only
from shardwright.tensor.autograd import apply, finished
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_local
from shardwright.tensor.plain import boundary
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_replicated, wrap

# Where a program finds a function of torch.
_HOMES = (torch, torch.Tensor, torch.nn.functional, nn_functions, torch.ops.aten)


class _LaidOut(torch.autograd.Function):
    """The operand as it is. Backward: a plain gradient, the same on every rank, in the operand's layout."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.target = x.device_mesh, finished(x._spec.layout)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None or isinstance(grad, DTensor):
            return grad
        whole = torch.zeros(grad.shape, dtype=grad.dtype) if grad._is_zerotensor() else grad
        placed = as_replicated(whole, ctx.mesh)
        target = placed._spec.layout.with_placements(ctx.target.placements, order=ctx.target.order_names)
        local = move_local(placed, target, reason="a gradient that torch makes of a size")
        return wrap(local, spec_of(target, ctx.mesh))


class _LaidOutBefore(torch.autograd.Function):
    """What is written next, as it is. Backward: as above, of the value from before the write."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.target = x.device_mesh, finished(x._spec.layout)
        ctx.mark_dirty(x)
        return x

    backward = _LaidOut.backward


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


def _compared(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place, and the gradient of the value that is overwritten is made of a size too."""
    x = args[0]
    if isinstance(x, DTensor) and x.requires_grad and not x.is_leaf and torch.is_grad_enabled():
        with preserve_version_counter(x):  # no value changes yet
            apply(_LaidOutBefore, x)
    return _written(func, args, kwargs)


def _padded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A constant around it is another op, whose derivatives are made of the gradient."""
    mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
    return func(*args, **kwargs) if mode == "constant" else _called(func, args, kwargs)


def _signed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`sgn_` of a real tensor is `sign_`, whose derivative is made of the gradient."""
    return func(*args, **kwargs) if args[0].is_complex() else args[0].sign_()


def _forms(names: str, *homes: Any) -> dict[Any, None]:
    """Every function of these names that a program can call, overloads included."""
    found = dict.fromkeys(
        function for name in names.split() for home in homes if (function := getattr(home, name, None))
    )
    packets = [f for f in found if isinstance(f, torch._ops.OpOverloadPacket)]
    return found | dict.fromkeys(getattr(packet, form) for packet in packets for form in packet.overloads())


_PLAIN = _forms(
    "copysign nextafter sgn repeat tile normal poisson prelu linear_cross_entropy stft"
    " avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
    " adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d lp_pool3d"
    " adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices"
    " max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices"
    " max_pool3d_with_indices fractional_max_pool2d fractional_max_pool3d"
    " fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices max_pool2d_with_indices_backward"
    " reflection_pad1d reflection_pad2d reflection_pad3d"
    " replication_pad1d replication_pad2d replication_pad3d",
    *_HOMES,
)
_COMPARISONS = "eq ne lt le gt ge less less_equal greater greater_equal not_equal"

OWN: dict[Any, boundary.Own] = {
    **dict.fromkeys(_PLAIN, _called),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack), _joined),
    **dict.fromkeys(_forms("copysign_ nextafter_ bernoulli_", *_HOMES), _written),
    **dict.fromkeys(_forms(" ".join(f"{n}_" for n in _COMPARISONS.split()), *_HOMES), _compared),
    **dict.fromkeys((torch.nn.functional.pad, pad_kernel), _padded),
    torch.Tensor.sgn_: _signed,
}
