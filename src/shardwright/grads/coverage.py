"""Whether every trained parameter is placed over the ranks that read other rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names
from shardwright.context.submesh import submesh
from shardwright.errors import ParallelError
from shardwright.grads.parameters import name_list
from shardwright.layout.mesh_shape import ranks_of
from shardwright.tensor.wrap import as_ours


def refuse_uncovered(parameters: Mapping[str, TorchDTensor]) -> None:
    """Raise ParallelError for parameters that leave out ranks which others are summed over.

    Where one parameter is replicated or sharded over data ranks, these read other rows; a parameter that is
    only tensor parallel there has another gradient on each of them, and nothing says that they are terms.
    Sends nothing.
    """
    summed = {axes: mesh for parameter in parameters.values() for axes, mesh in _summed(parameter)}
    ranks = {rank for mesh in summed.values() for rank in _ranks(mesh)}
    covered: dict[DeviceMesh, bool] = {}
    for parameter in parameters.values():
        mesh = parameter.device_mesh
        if mesh not in covered:
            covered[mesh] = ranks <= _ranks(mesh)
    names = [name for name, parameter in parameters.items() if not covered[parameter.device_mesh]]
    if names:
        placed = parameters[names[0]].device_mesh
        missing = sorted(ranks - _ranks(placed))
        raise ParallelError(
            f"{name_list(names)}: placed on {axis_names(placed)} only, while the gradients of others are "
            f"summed over ranks {missing} too, so nobody would sum these; place them over the same ranks "
            "with the strategy that places the others, or freeze them"
        )


def _summed(parameter: TorchDTensor) -> Iterator[tuple[tuple[DeviceMesh, tuple[str, ...]], DeviceMesh]]:
    """The mesh over which the ranks' terms of this parameter's gradient are added, if there is one."""
    use = as_ours(parameter)._spec.use
    sharded = getattr(parameter, "_fully_sharded", "")
    # Ranks of an axis that only cuts activations read the same rows: what is not on it is complete there.
    own = () if use is None else tuple(axis for axis in use.summed if axis in use.axes)
    axes = (*own, *((sharded,) if sharded else ()))
    known = tuple(axis for axis in axis_names(parameter.device_mesh) if axis in axes)
    if known:
        mesh = parameter.device_mesh
        yield (mesh, known), mesh if known == axis_names(mesh) else submesh(mesh, known)


def _ranks(mesh: DeviceMesh) -> set[int]:
    return {dist.get_rank(), *ranks_of(mesh)}
