"""`distribute_tensor`: one logical tensor becomes a DTensor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.dtype import bits
from shardwright.comm.record import because
from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.tensor.conversions import current_mesh
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.placements import PlacementsArgument, resolve_placements
from shardwright.tensor.spec import coords_of, spec_of
from shardwright.tensor.wrap import as_ours, wrap


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsArgument | None = None,
    *,
    src_data_rank: int | None = 0,
    order: tuple[str, ...] | None = None,
) -> DTensor:
    """A leaf DTensor with the values of `tensor`.

    Args:
        tensor: the whole logical tensor on every rank (on `src_data_rank` at least); a DTensor of this very
            layout passes through.
        placements: one per axis, or `{axis name: placement}`; axes not named: Replicate.
        src_data_rank: index on each axis of the rank whose data counts; None: each rank's own; sends nothing.
        order: axes in order of application, if not left to right.
    Raises: LayoutError: wrong count, unknown axis, dim out of range, a DTensor of another layout.
    Cost: a broadcast of the tensor per axis; none with `src_data_rank=None`, and none of a meta tensor, whose
        parts are meta tensors too (place, `to_empty`, initialise: the start of a model too large for a rank).
    """
    mesh = current_mesh(device_mesh)
    given = (Replicate(),) * mesh.ndim if placements is None else placements
    resolved, stated = resolve_placements(mesh, given, default="replicate")
    if isinstance(tensor, TorchDTensor):
        return _already(as_ours(tensor), mesh, resolved)
    if not tensor.is_leaf:
        raise LayoutError(
            "distribute_tensor makes a leaf: the given tensor has a history; use DTensor.from_local"
        )
    stride, order = tuple(tensor.stride()), order or stated
    layout = Layout(mesh, resolved, tuple(tensor.shape), dtype=tensor.dtype, stride=stride, order=order)
    coords = coords_of(mesh)
    if coords is None:
        return wrap(tensor.new_empty(0), spec_of(layout, mesh), requires_grad=tensor.requires_grad)
    full = tensor.detach() if tensor.is_meta else tensor.detach().to(mesh.device_type)
    if src_data_rank is not None:
        full = _from_source(full, mesh, src_data_rank)
    local = own_part(full, layout, coords)
    return wrap(local.detach(), spec_of(layout, mesh), requires_grad=tensor.requires_grad)


def own_part(full: torch.Tensor, layout: Layout, coords: tuple[int, ...]) -> torch.Tensor:
    """The part of `full` that belongs on these coords: dense, and not keeping the whole alive."""
    local = layout.split(full, coords)
    shares = local.untyped_storage()._cdata == full.untyped_storage()._cdata
    return local.clone() if shares and local.numel() < full.numel() else local


def _from_source(full: torch.Tensor, mesh: DeviceMesh, source: int) -> torch.Tensor:
    """The tensor of the source rank on every rank: a broadcast along each axis in turn."""
    if full.is_meta or mesh.size() == 1:
        return full
    result = full.contiguous().clone()
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        root = dist.get_global_rank(group, source)
        with because("distribute_tensor"):
            dist.broadcast(bits(result.view(-1)), root, group)
    return result if full.is_contiguous() else torch.empty_like(full).copy_(result)


def _already(x: DTensor, mesh: DeviceMesh, placements: tuple[object, ...]) -> DTensor:
    if x.device_mesh != mesh or x.placements != placements:
        raise LayoutError(
            f"the tensor is already distributed as {x._spec.layout}; use redistribute to move it"
        )
    return x
