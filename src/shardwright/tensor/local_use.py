"""Outside its local use and inside it: axes of a parameter that go when it computes, and come back after."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names, on_axes
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import ranks_of
from shardwright.placement.base import Replicate
from shardwright.placement.partial import Partial
from shardwright.remember import remembered
from shardwright.tensor.spec import LocalUse, Spec, Token, finished, spec_of, with_dtype
from shardwright.tensor.wrap import as_ours


def kept_spec(spec: Spec) -> Spec | None:
    """The spec that the computation sees: on the axes that are not localized; None when there are none."""
    return kept_of(spec.token)


@remembered(65536)
def kept_of(token: Token) -> Spec | None:
    """`kept_spec`, by the token: every parameter asks in every forward and every backward."""
    spec = token.spec
    use = _use(spec)
    names = axis_names(spec.mesh)
    kept = tuple(name for name in names if name not in use.axes)
    if not kept:
        return None
    mesh = on_axes(spec.mesh, kept)
    layout = _without_axes(spec.layout, use.axes, kept, mesh)
    return spec_of(layout, mesh)


def _without_axes(layout: Layout, gone: tuple[str, ...], kept: tuple[str, ...], mesh: Any) -> Layout:
    """The layout of what is left after the localized axes have cut the tensor."""
    placements = {a: p for a, p in zip(layout.axes, layout.placements, strict=True) if a in kept}
    shape = list(layout.shape)
    if any(p.is_partition for a, p in zip(layout.axes, layout.placements, strict=True) if a in gone):
        here = layout.coords_of(dist.get_rank())
        coords = tuple(0 if a in kept else c for a, c in zip(layout.axes, here, strict=True))
        bare = {a: p for a, p in zip(layout.axes, layout.placements, strict=True) if a in gone}
        only_gone = layout.with_placements(tuple(bare.get(axis, Replicate()) for axis in layout.axes))
        shape = list(only_gone.local_shape(coords))
    order = tuple(name for name in layout.order_names if name in kept)
    return Layout(mesh, placements, tuple(shape), dtype=layout.dtype, order=order)


@remembered(65536)
def gradient_inside(token: Token) -> Spec | None:
    """Where the gradient of what the computation sees (`kept_spec`) is to be, before it is the parameter's.

    It follows from the parameter alone. Where its terms are added up later, it stays a term.
    """
    inner = kept_of(token)
    if inner is None:
        return None
    layout = finished(inner.layout)
    terms = {
        axis: Partial("sum")
        for axis, placement in zip(layout.axes, layout.placements, strict=True)
        if axis in _use(token.spec).summed and placement.is_replicated
    }
    return spec_of(layout.with_placements(terms), inner.mesh)


def restored(spec: Spec, grad: torch.Tensor) -> tuple[torch.Tensor, Spec]:
    """The gradient of the computation's view as one of the parameter: its part, and its spec on all axes."""
    if not isinstance(grad, TorchDTensor):
        return grad, _restored_spec(spec.token, None, grad.dtype)
    ours = as_ours(grad)
    return ours._local_tensor, _restored_spec(spec.token, ours._spec.plain.token, grad.dtype)


def of_this_rank(spec: Spec, grad: Layout, mesh: DeviceMesh) -> Layout:
    """Where the gradient of a parameter is to be that was read as replicated on a mesh of other axes.

    A term on axes whose ranks the parameter's own sum adds up anyway (the ranks of an expert's router that
    also cut the sequence): finished there, it would count once for each of them. Whole on any other axis.
    """
    pairs = zip(spec.layout.axes, spec.layout.placements, strict=True)
    added = tuple(axis for axis, p in pairs if axis in _use(spec).summed and not p.is_partition)
    ranks = ranks_of(on_axes(spec.mesh, added)) if added else frozenset()
    terms = {axis for axis in grad.axes if ranks_of(on_axes(mesh, (axis,))) <= ranks}
    return grad.with_placements(
        {axis: Partial("sum") if axis in terms else Replicate() for axis in grad.axes}
    )


@remembered(65536)
def _restored_spec(token: Token, inside: Token | None, dtype: torch.dtype) -> Spec:
    """The spec of the gradient of a parameter, by that and by what the computation's gradient has."""
    spec, layout = token.spec, token.spec.layout
    inner: dict[str, Any] = {}
    if inside is not None:
        left = inside.spec.layout
        inner = dict(zip(left.axes, left.placements, strict=True))
    placements = []
    for axis, placement in zip(layout.axes, layout.placements, strict=True):
        if axis in inner:
            placements.append(inner[axis])
        else:
            term = axis in _use(spec).summed and not placement.is_partition
            placements.append(Partial("sum") if term else placement)
    target = with_dtype(layout, dtype)
    return spec_of(target.with_placements(tuple(placements), order=layout.order_names), spec.mesh)


def _use(spec: Spec) -> LocalUse:
    if spec.use is None:
        return LocalUse((), ())
    return spec.use
