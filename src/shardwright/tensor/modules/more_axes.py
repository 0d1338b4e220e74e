"""A parameter that a strategy placed on some axes is placed on others too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import axis_names, on_axes
from shardwright.compat.joined_meshes import union_mesh
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import as_mesh_shape, ranks_of
from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local_use import kept_spec
from shardwright.tensor.modules.slots import slots_of
from shardwright.tensor.placements import PlacementsArgument, resolve_placements
from shardwright.tensor.spec import LocalUse, spec_of
from shardwright.tensor.wrap import wrap

KEPT = LocalUse((), ())
CutOver = Mapping[str, frozenset[int]]  # axis -> the ranks along it, this one among them
_CUT_OVER = "_cut_over"


def comes_in_terms(owner: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Say of a parameter that computes as a DTensor: the axes of `mesh` cut the activations of its program.

    So its gradient comes in terms there. It stands with the module that registers it, where a strategy that
    places it on further axes reads it: `.to(dtype)` and `load_state_dict(assign=True)` make new parameters.
    Where data parallelism has placed it before, its own spec says so too.
    """
    known = vars(owner).setdefault(_CUT_OVER, {})
    ranks = {axis: ranks_of(on_axes(mesh, (axis,))) for axis in axis_names(mesh)}
    known[name] = {**known.get(name, {}), **ranks}
    parameter: object = owner._parameters[name]
    if isinstance(parameter, DTensor) and (use := parameter._spec.use) is not None:
        spec, known_axes = parameter._spec, (*use.axes, *use.summed)
        new = [axis for axis in ranks if axis in spec.layout.axes and axis not in known_axes]
        summed = _in_order(spec.mesh, (*use.summed, *new))
        shared = _together(use.shared, shared_by(ranks))
        parameter._spec = spec_of(spec.layout, spec.mesh, LocalUse(use.axes, summed, shared))


def said_of(owner: nn.Module, name: str) -> CutOver:
    """What `comes_in_terms` was told of a parameter, by the place where it is registered."""
    said: CutOver = vars(owner).get(_CUT_OVER, {}).get(name, {})
    return said


def cut_over(module: nn.Module) -> dict[nn.Parameter, CutOver]:
    """The axes that cut the activations of each parameter's program, said at any of its places."""
    found: dict[nn.Parameter, CutOver] = {}
    for slot in slots_of(module):
        found[slot.get()] = {**found.get(slot.get(), {}), **said_of(slot.owner, slot.name)}
    return found


def shared_by(cut: CutOver) -> tuple[int, ...]:
    """The ranks along the axes that cut its activations, in order."""
    return tuple(sorted(frozenset[int]().union(*cut.values())))


def use_of(parameter: DTensor, cut: Iterable[str]) -> LocalUse:
    """How it takes part in the computation: as its spec says, or as what `cut` its activations."""
    return parameter._spec.use or LocalUse((), tuple(cut))


def shared_ranks(left: DeviceMesh, right: DeviceMesh) -> set[int]:
    """Ranks, other than this one, that both meshes contain."""
    return (set(as_mesh_shape(left).ranks) & set(as_mesh_shape(right).ranks)) - {dist.get_rank()}


def is_free_for(x: DTensor, mesh: DeviceMesh) -> bool:
    """Is it whole on the axes that place it, computes locally on all, and are these not those of `mesh`?"""
    whole = kept_spec(x._spec) is None and x._spec.layout.is_fully_replicated
    apart = not set(axis_names(x.device_mesh)) & set(axis_names(mesh))
    return whole and apart and not shared_ranks(x.device_mesh, mesh)


def on_more_axes(
    before: DTensor,
    mesh: DeviceMesh,
    given: PlacementsArgument,
    use: LocalUse,
    source: int | None,
    cut: Iterable[str] = (),
) -> DTensor:
    """Old axes keep their placements and come first in order; the new axes place what those leave.

    Args:
        use: how the computation sees the new axes.
        cut: the old axes that cut its activations (`cut_over`).
    """
    placements, _ = resolve_placements(mesh, given, default="replicate")
    inner = distribute_tensor(before._local_tensor.detach(), mesh, placements, src_data_rank=source)
    old = before._spec.layout
    both = union_mesh([before.device_mesh, mesh])
    layout = Layout(
        both,
        {
            **dict(zip(old.axes, old.placements, strict=True)),
            **dict(zip(axis_names(mesh), placements, strict=True)),
        },
        old.shape,
        dtype=before.dtype,
        stride=old.stride,
        order=(*old.order_names, *axis_names(mesh)),
    )
    earlier = use_of(before, cut)
    joined = LocalUse(
        _in_order(both, (*earlier.axes, *use.axes)),
        _in_order(both, (*earlier.summed, *use.summed)),
        _together(earlier.shared, use.shared),
    )
    return wrap(inner._local_tensor, spec_of(layout, both, joined))


def _together(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*left, *right}))


def _in_order(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in axis_names(mesh) if name in names)
