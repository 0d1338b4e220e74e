"""A redistribution to the layout that a tensor has: found without making a layout, done without planning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.placement.convert import as_placement
from shardwright.tensor.autograd import Redistribute, apply
from shardwright.tensor.wrap import wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwright.tensor.dtensor import DTensor

_without_torch_function = torch._C.DisableTorchFunctionSubclass


def is_own_layout(x: DTensor, mesh: DeviceMesh | None, given: Any) -> bool:
    """True if these placements are surely those that `x` has; False where only a full look could tell.

    A sequence is applied left to right; a mapping keeps the order that `x` has.
    """
    spec = x._spec
    if mesh is not None and mesh is not spec.mesh and mesh != spec.mesh:
        return False
    layout = spec.layout
    kind = type(given)
    if kind is list or kind is tuple:
        mine = layout.placements
        in_order = layout.order == tuple(range(len(mine)))
        return in_order and len(given) == len(mine) and all(map(_same, given, mine))
    if kind is dict:
        axes = layout.mesh_shape.axes
        return all(
            name in axes and _same(p, layout.placements[axes.index(name)]) for name, p in given.items()
        )
    return False


def _same(given: Any, mine: Any) -> bool:
    return given is mine or as_placement(given) == mine


def unmoved(x: DTensor) -> DTensor:
    """A new tensor that shares the local tensor of `x`, differentiable, as a redistribution would give."""
    with _without_torch_function():
        differentiated = torch.is_grad_enabled() and x.requires_grad
    if differentiated:
        return apply(_Unmoved, x)
    local = x._local_tensor
    return wrap(local.view_as(local), x._spec)


class _Unmoved(Redistribute):
    """Its gradient may have another layout, and is brought back as that of any redistribution."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.source, ctx.mesh = x._spec.layout, x._spec.mesh
        ctx.set_materialize_grads(False)
        local = x._local_tensor
        return wrap(local.view_as(local), x._spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> torch.Tensor | None:  # type: ignore[override]
        return Redistribute.backward(ctx, grad)[0]
