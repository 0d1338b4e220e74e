"""How the mesh of a strategy relates to the mesh that a parameter is placed on already."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.nn.parameter import UninitializedParameter

from shardwright.compat import axis_names, root_mesh
from shardwright.context.submesh import refuse_outside
from shardwright.errors import ParallelError
from shardwright.layout.mesh_shape import ranks_of
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.modules.more_axes import shared_ranks

_NOT_ASKED = object()


def refuse_no_module(verb: str, module: object, left_alone: Collection[object] = ()) -> None:
    """Raise ParallelError for what is no module, and for one whose parameters have no shape yet."""
    if not isinstance(module, nn.Module):
        several = isinstance(module, list | tuple) and all(isinstance(each, nn.Module) for each in module)
        fix = "\n  fix: one call for each of these modules" if several and module else ""
        raise ParallelError(f"{verb} takes a module, got {type(module).__name__}{fix}")
    without = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    lazy = [name for name in without if not any(module.get_parameter(name) is p for p in left_alone)]
    if lazy:
        owner = type(module.get_submodule(lazy[0].rpartition(".")[0])).__name__
        raise ParallelError(
            f"{verb}: {lazy[0]}, of a {owner}, has no shape yet\n"
            "  fix: call the module once with a batch before, or make it with its sizes"
        )


def named_axes(
    mesh: DeviceMesh, verb: str, module: object = _NOT_ASKED, left_alone: Collection[object] = ()
) -> tuple[str, ...]:
    """The axis names of a mesh that a strategy works on; those of one axis may do without (`axis0`).

    Args: left_alone: parameters of the module that the strategy does not place.
    Raises: ParallelError: several axes without names, no mesh, one without this rank; no module; the mesh has
        ranks that hold other stages of the module; it or one that places a parameter already has no names to
        join axes by.
    """
    if module is not _NOT_ASKED:
        refuse_no_module(verb, module, left_alone)
    given: object = mesh
    if not isinstance(given, DeviceMesh):
        raise ParallelError(f"{verb} needs a mesh with axis names, got {type(given).__name__}")
    refuse_outside(mesh, verb, ParallelError)
    if mesh.mesh_dim_names is None and mesh.ndim > 1:
        raise ParallelError(f"{verb} needs a mesh with axis names; make it with mesh_dim_names=(...)")
    for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
        placed = parameter.device_mesh if isinstance(parameter, TorchDTensor) else mesh
        if placed != mesh and None in (placed.mesh_dim_names, mesh.mesh_dim_names):
            raise ParallelError(
                f"{verb}: {name} is placed on another mesh, and axes are joined by their names\n"
                "  fix: slice both from one mesh that is made with mesh_dim_names=(...)"
            )
        stages = getattr(parameter, "shared_by_stages", None)
        if stages is not None and shared_ranks(mesh, stages.mesh):
            raise ParallelError(
                f"{verb}: ranks of {axis_names(mesh)} hold other stages of the pipeline over "
                f"{axis_names(stages.mesh)[0]!r}, thus other layers\n  fix: slice the mesh: mesh['dp']"
            )
    return axis_names(mesh)


def one_axis(mesh: DeviceMesh, verb: str, module: object, of: str) -> str:
    """The axis of a mesh of one; its errors are those of `named_axes`, and several.  of: an axis to slice."""
    axes = named_axes(mesh, verb, module)
    if len(axes) != 1:
        raise ParallelError(f"{verb} takes one axis, got {axes}; slice the mesh: mesh[{of!r}]")
    return axes[0]


def refuse_other_order(mesh: DeviceMesh, axis: str, verb: str) -> None:
    """Raise ParallelError on all ranks where they do not ascend along the axis, also for a slice.

    torch sorts the ranks of a group, and what counts places there would give a rank the part of another.
    """
    root = root_mesh(mesh)
    of = root if axis in axis_names(root) else mesh
    ranks = of.mesh.movedim(axis_names(of).index(axis), -1)
    if bool((ranks.diff(dim=-1) < 0).any()):
        raise ParallelError(
            f"{verb}: the ranks of axis {axis!r} do not ascend in {of.mesh.tolist()}, and torch sorts those "
            "of a group\n  fix: make the mesh of ranks that ascend along it, as init_device_mesh does"
        )


def refuse_twice(path: str, placed: DTensor, axes: Sequence[str]) -> None:
    """Raise ParallelError where one of the axes places this parameter already."""
    twice = [axis for axis in axes if axis in placed._spec.layout.axes]
    if twice:
        raise ParallelError(
            f"{path}: axis {twice[0]!r} places this parameter already ({placed._spec.layout}); "
            "apply a strategy once per parameter and axis\n  fix: two strategies that share ranks take two "
            "axes; of experts over some axes and data over more of them, a mesh with other axis names each"
        )


def is_other_view(path: str, placed: DeviceMesh, mesh: DeviceMesh) -> bool:
    """Is a tensor of mesh `placed` spread over the ranks of `mesh` already, under other axis names?

    Experts are: their ep axes run over the data and context ranks of the dense mesh. A strategy on `mesh`
    then leaves the parameter alone.

    Raises: ParallelError: over some of these ranks only, so that nobody would add up over the rest.
    """
    if set(axis_names(placed)) & set(axis_names(mesh)) or not shared_ranks(placed, mesh):
        return False
    if ranks_of(mesh) <= ranks_of(placed):
        return True
    raise ParallelError(
        f"{path}: it is placed on {axis_names(placed)}, which are some of the ranks of {axis_names(mesh)}: "
        "it can neither be placed there once more nor be left alone\n"
        "  fix: take axes that share no ranks with those: mesh['dp'], not 'dp' and 'cp' flattened to one"
    )
