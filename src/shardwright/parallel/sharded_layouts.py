"""Where a parameter that a unit shards lies: outside of the forward, in it, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names, on_axes
from shardwright.compat.joined_meshes import union_mesh, views_of
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import ranks_of
from shardwright.placement.partial import Partial
from shardwright.placement.shard import Shard
from shardwright.tensor.local_use import kept_spec
from shardwright.tensor.modules.more_axes import shared_ranks, use_of
from shardwright.tensor.spec import Spec, finished, spec_of
from shardwright.tensor.wrap import as_ours


@dataclass(frozen=True)
class ShardedLayouts:
    """Of one parameter.

    value:          outside of the forward.
    gradient:       once the unit has summed it: pending on axes that nobody has summed over yet.
    inner:          what the computation sees; None: a plain tensor.
    inner_gradient: the gradient of that, before the unit sums it.
    """

    value: Spec
    gradient: Spec
    inner: Spec | None
    inner_gradient: Spec | None


def sharded_layouts(
    old: nn.Parameter, mesh: DeviceMesh, dim: int, dtype: torch.dtype, cut: Iterable[str]
) -> ShardedLayouts:
    """Of a parameter that is cut on `dim` over the one axis of `mesh`, after what placed it before.

    Axes whose ranks are among those of `mesh` go: there it was whole (`goes_within`), and from now on each of
    these ranks keeps a part. The computation sees it on them as before, and its gradient comes in terms.

    Args: cut: the axes that cut its activations.
    """
    (axis,), shape = axis_names(mesh), tuple(old.shape)
    if not isinstance(old, TorchDTensor):
        plain = spec_of(Layout(mesh, {axis: Shard(dim)}, shape, dtype=dtype), mesh)
        return ShardedLayouts(plain, plain, None, None)
    before, use = as_ours(old)._spec, use_of(as_ours(old), cut)
    gone = axes_within(before.mesh, mesh)
    stay = tuple(name for name in before.layout.axes if name not in gone)
    home = union_mesh([on_axes(before.mesh, stay), mesh]) if stay else mesh
    placed = dict(zip(before.layout.axes, before.layout.placements, strict=True))
    order = (*(name for name in before.layout.order_names if name in stay), axis)
    here: Mapping[str, Any] = {**{name: placed[name] for name in stay}, axis: Shard(dim)}
    value = Layout(home, here, shape, dtype=dtype, order=order)
    inner = kept_spec(before)
    left = tuple(name for name in stay if name in use.summed)
    return ShardedLayouts(
        spec_of(value, home),
        spec_of(in_terms(value, left), home),
        inner,
        None if inner is None else spec_of(in_terms(finished(inner.layout), (*gone, *left)), inner.mesh),
    )


def in_terms(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """Pending on those of these axes on which it is whole."""
    pairs = zip(layout.axes, layout.placements, strict=True)
    return layout.with_placements({a: Partial("sum") for a, p in pairs if a in axes and p.is_replicated})


def goes_within(parameter: nn.Parameter, mesh: DeviceMesh, others: DeviceMesh) -> bool:
    """Can `mesh` take the place of axes that the parameter is on? It computes as what it is, whole, there.

    Args: others: the mesh that `mesh` was sliced from, with which the other axes must share no ranks.
    """
    if not isinstance(parameter, TorchDTensor):
        return False
    spec, local = as_ours(parameter)._spec, use_of(as_ours(parameter), ()).axes
    gone = axes_within(spec.mesh, mesh)
    placed = dict(zip(spec.layout.axes, spec.layout.placements, strict=True))
    if not gone or any(name in local or not placed[name].is_replicated for name in gone):
        return False
    stay = tuple(name for name in placed if name not in gone)
    return not stay or not shared_ranks(on_axes(spec.mesh, stay), others)


def beside_in(mesh: DeviceMesh, parameter: nn.Parameter) -> DeviceMesh:
    """Where a parameter without dims, which no unit cuts, is replicated so that it lies on all of `mesh`.

    On the other axes of the same root, where it lies on some of these ranks and computes as what it is; else
    on `mesh` itself.
    """
    held = parameter.device_mesh if isinstance(parameter, TorchDTensor) else mesh
    gone = axes_within(held, mesh)
    if gone and kept_spec(as_ours(parameter)._spec) is not None:  # type: ignore[arg-type]  # a DTensor
        taken, size = on_axes(held, gone), mesh.size()
        for view in views_of(mesh):
            axes = {name: on_axes(view, (name,)) for name in axis_names(view) if view.ndim > 1}
            names = [n for n, a in axes.items() if a.size() > 1 and ranks_of(a) <= ranks_of(mesh)]
            free = [name for name in names if not shared_ranks(axes[name], taken)]
            if free and math.prod(axes[name].size() for name in free) * taken.size() == size:
                return on_axes(view, free)
    return mesh


def axes_within(placed: DeviceMesh, mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes of `placed`, of several ranks, whose ranks are all among those of `mesh`, of other names."""
    ranks, others = ranks_of(mesh), (axis for axis in axis_names(placed) if axis not in axis_names(mesh))
    held = {axis: ranks_of(on_axes(placed, (axis,))) for axis in others}
    return tuple(axis for axis, those in held.items() if len(those) > 1 and those <= ranks)
