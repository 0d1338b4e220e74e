"""Gradients that torch makes of a size alone: zeros of no operand, so plain where the operand is a DTensor.

The derivative of `copysign` by its second operand, of `sgn`, of a comparison in place, of a repetition with
no copies, of a list's member of shape (0,) that a concatenation passes over, the second derivative of pools
and paddings, of whatever has `sgn` in its first (`abs`, norms): torch states them as zeros of a shape
(`zeros_like(self)` in its derivatives.yaml), and nobody who sees DTensors is asked. When such an op is
dispatched, whoever called it (a program, another op of torch, a derivative), its operands' places in the
graph are told to lay out what comes as the operand lies. Every other op pays nothing.

What is written in place passes a point of the graph instead: its place is another one after the write.

Rejected: a mode around every backward (all its ops would pass it), and hooks on leaves (a user counts them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import (
    DispatchKey,
    exclude_key,
    is_batch_of_gradients,
    is_key_excluded,
    preserve_version_counter,
    tree_leaves,
    tree_map_only,
)
from shardwright.compat.dynamo import read_in_backward
from shardwright.layout.layout import Layout
from shardwright.rules.call import Args, Kwargs
from shardwright.tensor.autograd import apply
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_asked
from shardwright.tensor.plain import boundary
from shardwright.tensor.spec import finished, spec_of
from shardwright.tensor.wrap import as_replicated, wrap

Call = Callable[[torch._ops.OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]

# Ops of one of whose operands torch makes a gradient of its size.
WATCHED = frozenset(
    f"aten::{name}"
    for name in (
        "copysign", "copysign_", "nextafter", "nextafter_", "sgn", "sgn_", "repeat", "cat", "normal",
        "poisson", "bernoulli_", "_prelu_kernel_backward",
        *(f"{name}{dims}_backward" for name in ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool",
                                                "fractional_max_pool") for dims in ("2d", "3d")),
        "max_pool2d_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
        *(f"{name}{dims}_backward" for name in ("reflection_pad", "replication_pad")
          for dims in ("1d", "2d", "3d")),
    )
)  # fmt: skip

# Of these, only calls that pass over an operand.
_ONLY: dict[str, Callable[..., bool]] = {
    "aten::cat": lambda members, *_: any(x.shape == (0,) for x in members),
    "aten::repeat": lambda _, repeats: 0 in repeats,
}


def passes_over(func: torch._ops.OpOverload, args: Args) -> bool:
    """May this call of such an op have an operand that gets zeros of a size?"""
    only = _ONLY.get(func._schema.name)
    return only is None or only(*args)


def awaited(route: Call, func: torch._ops.OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The op; plain gradients of its operands will be laid out as these are."""
    if torch.is_grad_enabled() and passes_over(func, args):
        for x in tree_leaves((args, dict(kwargs))):
            if isinstance(x, DTensor) and x.requires_grad:
                _await(x)
    return route(func, args, kwargs)


def _await(x: DTensor) -> None:
    edge = _edge(x)
    if edge is None:
        return
    place, mesh, target = edge.output_nr, x.device_mesh, finished(x._spec.layout)

    def lay_out(grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else _as_it_lies(grad, mesh=mesh, target=target)

    if torch.compiler.is_compiling():  # the gradient of a graph's input is taken before its place is asked
        x.register_hook(lay_out)  # type: ignore[no-untyped-call]
    else:
        edge.node.register_prehook(lambda grads: (*grads[:place], lay_out(grads[place]), *grads[place + 1 :]))


def await_all(results: Sequence[Any]) -> None:
    """Have the backward of a graph get zeros as they lie for results that no loss reads (logits beside one).

    torch makes plain ones, of which its compiled backward says that it expected a DTensor.
    """
    wanted = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    for x in wanted if len(wanted) > 1 else ():
        if not isinstance(x, DTensor) or x.grad_fn is None:
            continue
        edge = get_gradient_edge(x)
        if edge.node.name() == "CompiledFunctionBackward":
            mesh, target = x.device_mesh, finished(x._spec.layout)
            read_in_backward(edge.node, edge.output_nr, partial(_as_it_lies, mesh=mesh, target=target))


def _as_it_lies(grad: Any, *, mesh: DeviceMesh, target: Layout) -> Any:
    return grad if _is_laid_out(grad) else _laid_out(grad, mesh, target)


def _is_laid_out(grad: Any) -> bool:
    """Is it a DTensor, or what a transform or a batch of gradients makes of one?

    torch has no batches of zeros that it makes of a size alone: all of a batch have the same.
    """
    return isinstance(grad, DTensor) or is_batch_of_gradients(grad) or boundary.wraps_distributed(grad)


def _edge(x: DTensor) -> GradientEdge | None:
    """Where its gradient arrives; None: nowhere, as for a view of a parameter that `no_grad` made.

    torch finds that of a leaf with a view, which autograd must see.
    """
    key = DispatchKey.AutogradFunctionality
    before = is_key_excluded(key)
    exclude_key(key, False)
    try:
        return None if _is_cut_off(x) else get_gradient_edge(x)
    finally:
        exclude_key(key, before)


def _is_cut_off(x: DTensor) -> bool:
    """Of a view that `no_grad` made of a parameter torch says that it requires a gradient; it gets none."""
    if x.grad_fn is not None or not x._is_view():
        return False
    node = x.view_as(x).grad_fn
    return node is None or node.next_functions[0][0] is None


def laid_out(grads: Iterable[torch.Tensor | None], inputs: Iterable[Any]) -> tuple[torch.Tensor | None, ...]:
    """What `torch.autograd.grad` found for these inputs: their places do not see it."""
    return tuple(
        as_operand(x, grad)
        if isinstance(x, DTensor) and isinstance(grad, torch.Tensor) and not _is_laid_out(grad)
        else grad
        for grad, x in zip(grads, inputs, strict=True)
    )


def as_operand(x: DTensor, grad: torch.Tensor) -> DTensor:
    """A plain gradient of `x`, as `x` lies. Derivatives in forward mode have zero tangents without memory.

    torch multiplies those before anybody is asked, so no op tells the places of its operands.
    """
    return _laid_out(grad, x.device_mesh, finished(x._spec.layout))


def _laid_out(grad: torch.Tensor, mesh: DeviceMesh, like: Layout) -> DTensor:
    placed = as_replicated(grad, mesh)
    target = placed._spec.layout.with_placements(like.placements, order=like.order_names)
    local = move_asked(placed, target, reason="a gradient that torch makes of a size")
    return wrap(local, spec_of(target, mesh))


# ---------------------------------------------------------------------------------------- in place


class _LaidOutBefore(torch.autograd.Function):
    """What is written next, as it is. Backward: as above, of the value from before the write."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.target = x.device_mesh, finished(x._spec.layout)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad if grad is None or _is_laid_out(grad) else _laid_out(grad, ctx.mesh, ctx.target)


class _LaidOut(torch.autograd.Function):
    """The operand as it is. Backward: as above."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.target = x.device_mesh, finished(x._spec.layout)
        return x.view_as(x)

    backward = _LaidOutBefore.backward


def _written(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """In place, and the gradient of the value that is overwritten is made of a size too."""
    x = args[0]
    if isinstance(x, DTensor) and x.requires_grad and not x.is_leaf and torch.is_grad_enabled():
        with preserve_version_counter(x):  # no value changes yet
            apply(_LaidOutBefore, x)
    rest, kwargs = tree_map_only(DTensor, _passed, (args[1:], kwargs))
    return func(x, *rest, **kwargs)


def _passed(x: DTensor) -> DTensor:
    return apply(_LaidOut, x) if x.requires_grad and torch.is_grad_enabled() else x


def _forms(names: Iterable[str], *homes: Any) -> dict[Any, None]:
    """Every function of these names that a program can call, overloads included."""
    found = dict.fromkeys(
        function for name in names for home in homes if (function := getattr(home, name, None))
    )
    packets = [f for f in found if isinstance(f, torch._ops.OpOverloadPacket)]
    return found | dict.fromkeys(getattr(packet, form) for packet in packets for form in packet.overloads())


_IN_PLACE = (
    "eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "not_equal", "sgn",
)  # fmt: skip

OWN: dict[Any, boundary.Own] = dict.fromkeys(
    _forms([f"{name}_" for name in _IN_PLACE], torch, torch.Tensor, torch.ops.aten), _written
)
