"""What a redistribution need not do again: make the layout it leads to, or move to the layout that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.compat import DisableTorchFunctionSubclass
from shardwright.placement.base import Placement
from shardwright.placement.convert import as_placement
from shardwright.remember import remembered
from shardwright.tensor.autograd import Redistribute, apply
from shardwright.tensor.wrap import wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwright.layout.layout import Layout
    from shardwright.tensor.dtensor import DTensor

_without_torch_function = DisableTorchFunctionSubclass


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
    if given is mine:
        return True
    other = given if given.__class__ is mine.__class__ else as_placement(given)
    return bool(other == mine)


def known_target(x: DTensor, mesh: DeviceMesh, given: Any) -> Layout | None:
    """The layout that a list of our placements means on the mesh of `x`, made once; else None."""
    spec = x._spec
    if mesh is not spec.mesh or not isinstance(given, list | tuple) or hasattr(given, "order"):
        return None
    for placement in given:
        if not isinstance(placement, Placement):
            return None
    if len(given) != len(spec.placements):
        return None
    return _target(spec.layout, tuple(map(as_placement, given)))


@remembered(4096)
def _target(layout: Layout, placements: tuple[Placement, ...]) -> Layout:
    return layout.with_placements(placements)


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
