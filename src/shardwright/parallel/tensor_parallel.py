"""Tensor parallelism: torch's styles, or placements by parameter name, on one axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import ParallelStyle

from shardwright.errors import ParallelError
from shardwright.parallel.meshes import named_axes
from shardwright.parallel.plan_of_styles import apply_styles
from shardwright.parallel.swap import replace_parameters
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.module import carry_over, distribute_module
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
        apply_styles(module, mesh, {"": parallelize_plan})
        return _in_our_class(module)
    styles = [isinstance(value, ParallelStyle) for value in parallelize_plan.values()]
    if not styles or (any(styles) and not all(styles)):
        raise ParallelError(
            "parallelize_tensor: the plan names styles, or placements, at least one and not both"
        )
    if not all(styles):
        return distribute_module(module, mesh, parallelize_plan)
    apply_styles(module, mesh, parallelize_plan)
    return _in_our_class(module)


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
