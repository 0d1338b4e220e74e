"""Placing parameters that compute as local tensors: the mechanism below the strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import axis_names
from shardwright.errors import ParallelError
from shardwright.grads.at_steps import watch_steps
from shardwright.parallel.meshes import is_other_view, refuse_twice
from shardwright.parallel.swap import replace_parameters
from shardwright.placement.base import Placement
from shardwright.tensor.distribute import distribute_tensor
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.modules.distribute import carry_over
from shardwright.tensor.modules.more_axes import cut_over, on_more_axes, shared_by
from shardwright.tensor.modules.ties import ties_kept
from shardwright.tensor.spec import LocalUse, spec_of
from shardwright.tensor.wrap import as_ours, wrap

Source = int | None


def place_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    summed: tuple[str, ...],
    *,
    src_data_rank: Source = 0,
    skip: Callable[[nn.Parameter], bool] = lambda _: False,
) -> dict[nn.Parameter, nn.Parameter]:
    """Make every parameter a DTensor on `mesh` too, computed with as its local tensor there.

    A parameter that other axes place already (tensor parallel, another replicate) keeps those placements; one
    that is spread over the same ranks under other names (an expert) is left alone.

    Args:
        placements: one per axis of `mesh`.
        summed: axes of `mesh` on which the ranks compute different terms of the loss.
    Raises: ParallelError: an axis of `mesh` places the parameter already, `fully_shard` manages it, or a tied
        one was placed in another way under its other name. Nothing has been changed then.
    Cost: a broadcast of each parameter over each axis (none with `src_data_rank=None`).
    """
    use, cut = LocalUse(axis_names(mesh), summed), cut_over(module)

    def make(path: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if skip(parameter):
            return None
        here = replace(use, shared=shared_by(cut[parameter]))
        return placed_parameter(path, parameter, mesh, placements, here, src_data_rank, cut[parameter])

    with ties_kept(module, "a strategy"):
        return replace_parameters(module, make)


def placed_parameter(
    path: str,
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    use: LocalUse,
    source: Source,
    cut: Iterable[str],
) -> nn.Parameter | None:
    """The parameter on one mesh more; None when it belongs to another view of these ranks."""
    watch_steps()
    if isinstance(parameter, TorchDTensor):
        before = as_ours(parameter)
        if is_other_view(path, before.device_mesh, mesh) or _nothing_to_do(before, mesh):
            return None
        refuse_twice(path, before, axis_names(mesh))
        _refuse_sharded(path, parameter, mesh)
        value = on_more_axes(before, mesh, placements, use, source, cut)
    else:
        plain = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=source)
        value = wrap(plain._local_tensor, spec_of(plain._spec.layout, mesh, use))
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    carry_over(parameter, new)
    return new


def _nothing_to_do(before: DTensor, mesh: DeviceMesh) -> bool:
    """On a mesh of one rank a parameter that computes locally already is complete."""
    same = set(axis_names(before.device_mesh)) & set(axis_names(mesh))
    return mesh.size() == 1 and before._spec.use is not None and not same


def _refuse_sharded(path: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    axis = getattr(parameter, "_fully_sharded", "")
    if axis:
        raise ParallelError(
            f"{path}: fully_shard manages this parameter on axis {axis!r} and hands out its own; place it on "
            f"{axis_names(mesh)} first and shard it then, or do both with parallelize_hsdp"
        )


def local_plain(parameter: nn.Parameter) -> torch.Tensor:
    """What is stored on this rank: the local tensor of a DTensor, the tensor itself otherwise."""
    if isinstance(parameter, TorchDTensor):
        return parameter._local_tensor.detach()
    return parameter.detach()
