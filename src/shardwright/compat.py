"""Everything that differs between the supported versions of torch, and every private name of torch that we touch.

Supported: torch 2.11 to 2.13. Nothing else in the package asks for a version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's axes; an unnamed mesh gets `axis0`, `axis1`, ..."""
    names = mesh.mesh_dim_names
    return tuple(names) if names is not None else tuple(f"axis{i}" for i in range(mesh.ndim))


def shard_order_axes(spec: DTensorSpec) -> tuple[tuple[TorchPlacement, ...], tuple[str, ...] | None]:
    """Placements and order of application that a spec of torch means.

    torch writes an order that is not left to right in one of two ways: strided shards, or `shard_order`.
    A strided shard that no order explains stays as it is.
    """
    placements = tuple(spec.placements)
    entries = getattr(spec, "shard_order", None)
    if any(isinstance(p, _StridedShard) for p in placements):
        decode = getattr(DTensorSpec, "_maybe_convert_StridedShard_to_shard_order", None)
        entries = decode(placements, spec.mesh) if decode is not None else None
        if entries is None:
            return placements, None
        placements = tuple(_unstrided(p) for p in placements)
    return placements, _order_names(entries, axis_names(spec.mesh))


def _unstrided(placement: TorchPlacement) -> TorchPlacement:
    from torch.distributed.tensor.placement_types import Shard

    return Shard(placement.dim) if isinstance(placement, _StridedShard) else placement


def _order_names(entries: Any, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """One order of all axes that has every entry's axes in the entry's order."""
    if not entries or all(list(e.mesh_dims) == sorted(e.mesh_dims) for e in entries):
        return None
    order = [axis for entry in entries for axis in entry.mesh_dims]
    order += [axis for axis in range(len(names)) if axis not in order]
    return tuple(names[axis] for axis in order)


def union_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several sub-meshes of one root, outermost axis first.

    Cost: none, the process groups of the axes are kept. Source: torch's own FSDP joins meshes in this way.
    """
    axes = {name: mesh[name] for mesh in meshes for name in axis_names(mesh)}
    ordered = sorted(axes.values(), key=_outermost_first)
    return ordered[0] if len(ordered) == 1 else DeviceMesh._concatenate(ordered)


def _outermost_first(axis: DeviceMesh) -> tuple[int, int]:
    ranks = axis.mesh.flatten()
    stride = int(ranks[1] - ranks[0]) if len(ranks) > 1 else 0
    return (-stride, 0)
