"""From one mesh to another: which layout a tensor gets there, and which its gradient gets back."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.traced import refuse_between
from shardwright.compat import root_ranks
from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import as_mesh_shape
from shardwright.layout.strided import same_regions
from shardwright.placement.base import Pending
from shardwright.plan.decide import plan_redistribution
from shardwright.remember import remembered
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.placements import PlacementsArgument, resolve_placements


def layout_on(
    x: DTensor, mesh: DeviceMesh, given: PlacementsArgument, order: Sequence[str] | None = None
) -> Layout:
    """The layout that `x` gets on a mesh, its own or another one.

    Args:
        given: one placement per axis, or a mapping; axes that it does not name keep the placement that `x`
            has on an axis of that name, and replicate if `x` has none.
    Raises: LayoutError: a wrong count or axis; between meshes: two types of device, or a slice of a larger
        mesh, which is another one on every rank. PlanError: between meshes in a traced graph.
    """
    if mesh == x.device_mesh:
        own = x._spec.shown.layout
        resolved, kept = resolve_placements(mesh, given, default="layout", own=own)
        return own.with_placements(resolved, order=order if order is not None else kept)
    refuse_between(x._spec.layout, x._local_tensor)
    fault = _fault(x.device_mesh, mesh)
    if fault:
        raise LayoutError(f"{x._spec.layout} {fault}")
    old = x._spec.layout
    resolved, kept = resolve_placements(mesh, given, default="layout", own=old)
    order = order if order is not None else kept
    return Layout(mesh, resolved, old.shape, dtype=old.dtype, stride=old.stride, order=order)


def is_placed_as(x: DTensor, given: PlacementsArgument) -> bool:
    """Does each rank hold what these placements say, on the mesh of `x`? Not where only one is pending.

    The order of the axes counts (a list without one: left to right), and strided cuts may say it.
    """
    return _are_alike(x._spec.layout, layout_on(x, x.device_mesh, given))


@remembered(4096)
def _are_alike(have: Layout, want: Layout) -> bool:
    if have == want:
        return True
    return not (have.pending_axes or want.pending_axes) and same_regions(have, want)


@remembered(1024)
def _fault(home: DeviceMesh, mesh: DeviceMesh) -> str:
    """Why a tensor cannot go from one mesh to the other; empty if it can."""
    if home.device_type != mesh.device_type:
        return (
            f"lives on a mesh of {home.device_type} devices and cannot be redistributed to one of "
            f"{mesh.device_type} devices: copy it to the other device on its own mesh first"
        )
    here, there = (frozenset(as_mesh_shape(which).ranks) for which in (home, mesh))
    if here == there or (root_ranks(home) == here and root_ranks(mesh) == there):
        return ""
    return (
        f"cannot go from a mesh of ranks {sorted(here)} to one of ranks {sorted(there)}: one of them is a "
        "slice of a larger mesh, so ranks disagree about who takes part; make both with DeviceMesh or "
        "init_device_mesh"
    )


def own_coords(layout: Layout) -> tuple[int, ...] | None:
    """This rank's coordinates on the mesh of a layout, None when it is not part of it."""
    rank = dist.get_rank()
    return layout.coords_of(rank) if rank in layout.ranks else None


def acceptable_between(source: Layout, gradient: Layout) -> Layout:
    """The cheapest layout, on the mesh of a value, for its gradient that lives on another mesh.

    A replicated value takes a sum that is still pending as well, if the gradient is one and that moves less.
    """
    finished = _on(source, gradient, {})
    pending = {placement for placement in gradient.placements if isinstance(placement, Pending)}
    if len(pending) != 1:
        return finished
    (term,) = pending
    free = [name for name, p in zip(source.axes, source.placements, strict=True) if p.is_replicated]
    if not free or not term.linear:
        return finished
    pended = _on(source, gradient, dict.fromkeys(free, term))
    costs = [plan_redistribution(gradient, layout).total_bytes for layout in (finished, pended)]
    return pended if costs[1] < costs[0] else finished


def _on(source: Layout, gradient: Layout, changed: dict[str, Pending]) -> Layout:
    placements = [changed.get(name, p.dual()) for name, p in zip(source.axes, source.placements, strict=True)]
    return Layout(
        source.mesh_shape,
        placements,
        gradient.shape,
        dtype=gradient.dtype,
        stride=gradient.stride,
        order=source.order_names,
    )
