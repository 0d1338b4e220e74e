"""Placement arguments: a sequence with one placement per axis, or a mapping by axis name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Partial as TorchPartial
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from shardwright.compat import StridedShard, axis_names, rebuilds_by_placements
from shardwright.errors import LayoutError, as_several
from shardwright.layout.arrangement import OrderedPlacements
from shardwright.layout.layout import Layout
from shardwright.layout.strided import to_strided
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.convert import as_placement

PlacementsArgument = Sequence[Any] | Mapping[str, Any]
Unnamed = Literal["replicate", "layout", "error"]

# Classes of torch whose placements mean what ours do.
TORCHS = frozenset({TorchShard, TorchReplicate, TorchPartial})


def mesh_and_placements(call: str, mesh: DeviceMesh | Any, placements: Any) -> tuple[DeviceMesh | None, Any]:
    """The two, told apart where the placements stand first and no mesh is given.

    Raises: LayoutError: no placements, or two.
    """
    first = None if mesh is None or isinstance(mesh, DeviceMesh) else mesh
    if first is not None and placements is not None:
        raise LayoutError(f"{call} got two placements, {first} and {placements}: a mesh stands first, if any")
    given = placements if first is None else first
    if given is None:
        raise LayoutError(f"{call} needs placements: one per axis, or {{axis name: placement}}")
    return (mesh if isinstance(mesh, DeviceMesh) else None), given


def placements_of(layout: Layout) -> tuple[Any, ...]:
    """The placements of a layout, with their order if it is not left to right; for torch's own, strided cuts.

    Raises: LayoutError: the strided cuts would hold other elements.
    """
    if layout.order == tuple(range(len(layout.order))):
        return layout.placements
    asking = rebuilds_by_placements()
    if not asking or (asking == "_distribute_state_dict" and not layout.is_even):  # which cuts evenly only
        return OrderedPlacements(layout.placements, layout.order_names)
    pairs = zip(layout.placements, to_strided(layout).placements, strict=True)
    return tuple(own if own == cut else StridedShard(cut.dim, split_factor=cut.chunks) for own, cut in pairs)  # type: ignore[attr-defined]


def resolve_placements(
    mesh: DeviceMesh, given: PlacementsArgument, *, default: Unnamed, own: Layout | None = None
) -> tuple[tuple[Placement, ...], tuple[str, ...] | None]:
    """One placement per axis of `mesh`, and the order of application that stays valid (None: left to right).

    Args:
        given: one per axis, or `{axis name: placement}`.
        default: what an axis gets that a mapping does not name: Replicate, the placement that `own` has on
            the axis of this name (Replicate if it has none), or an error.
    Raises: LayoutError: a wrong count, an axis that the mesh does not have, an axis not named.
    """
    names = axis_names(mesh)
    if isinstance(given, Mapping):
        return _by_name(names, given, default, own)
    if isinstance(given, TorchPlacement):
        raise LayoutError(
            f"{given!r} alone: give a list with one placement per axis of {names}, or a mapping"
        )
    if not isinstance(given, tuple | list):
        fix = f"a list with one placement for each axis of {names}, or a mapping {{axis name: placement}}"
        several = as_several("placements", given, LayoutError, fix=fix)
    else:
        several = tuple(given)
    placements = tuple(as_placement(p) for p in several)
    if len(placements) != len(names):
        raise LayoutError(
            f"{len(placements)} placements for a mesh of {len(names)} axes {names}, which must have the same "
            "length: give one per axis, or a mapping {axis name: placement}"
        )
    return placements, getattr(given, "order", None)  # what `from_partition_spec` returns knows its order


def gradient_layout(mesh: DeviceMesh, own: Layout, given: PlacementsArgument, *, default: Unnamed) -> Layout:
    """The layout that the gradient of this rank's part of a tensor, laid as `own`, is said to have.

    Raises: LayoutError: in it this rank's part has another shape, and what `resolve_placements` raises.
    """
    placements, order = resolve_placements(mesh, given, default=default, own=own)
    stated = own.with_placements(placements, order=own.order_names if order is None else order)
    coords = mesh.get_coordinate()  # not `coords_of`: specs are above
    part, other = (x.local_shape(tuple(coords)) if coords else () for x in (own, stated))
    if part != other:
        raise LayoutError(
            f"grad_placements: the part {part} of {own} would have a gradient {stated}, of which this rank "
            f"holds {other}: state placements whose parts have the shape of the tensor's own"
        )
    return stated


def _by_name(
    names: tuple[str, ...], given: Mapping[str, Any], default: Unnamed, own: Layout | None
) -> tuple[tuple[Placement, ...], tuple[str, ...] | None]:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise LayoutError(f"the mesh has no axis {unknown[0]!r}; its axes are {names}")
    missing = [name for name in names if name not in given]
    if missing and default == "error":
        raise LayoutError(f"no placement for axis {missing[0]!r}: every axis of {names} must be named here")
    held = dict(zip(own.axes, own.placements, strict=True)) if own is not None else {}
    keep = default == "layout" and own is not None
    filled: list[Placement] = [
        as_placement(given[name]) if name in given else (held.get(name, Replicate()) if keep else Replicate())
        for name in names
    ]
    order = tuple(name for name in own.order_names if name in names) if keep and own is not None else None
    return tuple(filled), order
