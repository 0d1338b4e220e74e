"""Tensor parallelism: torch's styles, or placements by parameter name, on one axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardwright.errors import ParallelError
from shardwright.parallel.meshes import named_axes
from shardwright.parallel.plan_of_styles import apply_styles
from shardwright.parallel.swap import put_all, replace_parameters
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.modules.distribute import carry_over, distribute_module
from shardwright.tensor.modules.more_axes import KEPT, is_free_for, on_more_axes
from shardwright.tensor.modules.slots import Slot, slots_of
from shardwright.tensor.modules.ties import ties_kept
from shardwright.tensor.wrap import as_ours


def parallelize_tensor(
    module: nn.Module, mesh: DeviceMesh, parallelize_plan: ParallelStyle | Mapping[str, Any]
) -> nn.Module:
    """Cut the parameters that the plan names over the one axis of `mesh`, in place; compute on DTensors.

    Args:
        parallelize_plan: a style for the module itself; `{submodule pattern: style}` with torch's own styles
            (`ColwiseParallel`, ...); or `{parameter pattern: placements}` (see `distribute_module`), which
            replicates every other parameter.
    Raises: ParallelError: not one axis, an empty plan, styles and placements mixed, an unknown name, two
        styles for one shared module, a style for parameters that are placed already or for a module that it
        does not take; nothing has been changed then.
    Cost: as the styles say: an all-reduce (or its two halves) per pair of cut layers and pass.
    Source: Megatron-LM, arXiv 1909.08053, section 3.
    """
    axes = named_axes(mesh, "parallelize_tensor")
    if len(axes) != 1:
        raise ParallelError(f"parallelize_tensor takes one axis, got {axes}; slice the mesh: mesh['tp']")
    if isinstance(parallelize_plan, ParallelStyle):
        return _by_styles(module, mesh, {"": parallelize_plan})
    styles = [isinstance(value, ParallelStyle) for value in parallelize_plan.values()]
    if not styles or (any(styles) and not all(styles)):
        raise ParallelError(
            "parallelize_tensor: the plan names styles, or placements, at least one and not both"
        )
    if not all(styles):
        return distribute_module(module, mesh, parallelize_plan)
    return _by_styles(module, mesh, parallelize_plan)


def _by_styles(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> nn.Module:
    """torch's styles on what each rank holds; the axes of an earlier replicate are put back afterwards."""
    with ties_kept(module, "parallelize_tensor"):
        before = [(slot, slot.get()) for slot in slots_of(module)]
        plain = {old: _bare(old) for old in dict.fromkeys(old for _, old in before) if _is_free(old, mesh)}
        put_all([slot for slot, _ in before], plain)
        apply_styles(module, mesh, plan)
        _in_our_class(module)
        _put_axes_back([(slot, old) for slot, old in before if old in plain], plain)
    return module


def _put_axes_back(
    before: Sequence[tuple[Slot, nn.Parameter]], plain: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """What the plan did not name is what it was; what it cut lives on the axes of its replicas too."""
    made: dict[nn.Parameter, nn.Parameter] = {new: old for old, new in plain.items()}
    for slot, old in before:
        new = slot.get()
        if new not in made:
            home, cut = _ours(old), _ours(new)
            value = on_more_axes(cut, home.device_mesh, home.placements, home._spec.use or KEPT, None)
            made[new] = nn.Parameter(value, requires_grad=old.requires_grad)
            carry_over(old, made[new])
        slot.put(made[new])


def _is_free(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    return isinstance(parameter, DTensor) and is_free_for(parameter, mesh)


def _ours(parameter: torch.Tensor) -> DTensor:
    """A parameter that is a DTensor, typed."""
    return as_ours(cast("TorchDTensor", parameter))


def _bare(parameter: nn.Parameter) -> nn.Parameter:
    """What a replicated parameter is on this rank."""
    plain = nn.Parameter(_ours(parameter)._local_tensor.detach(), requires_grad=parameter.requires_grad)
    carry_over(parameter, plain)
    return plain


def _in_our_class(module: nn.Module) -> nn.Module:
    """torch's styles make torch's DTensors; from here on every op on them is dispatched by our rules."""

    def make(_: str, parameter: nn.Parameter) -> nn.Parameter | None:
        value: torch.Tensor = parameter
        if not isinstance(value, TorchDTensor) or isinstance(value, DTensor):
            return None
        new = nn.Parameter(as_ours(value), requires_grad=parameter.requires_grad)
        carry_over(parameter, new)
        return new

    replace_parameters(module, make)
    return module
