"""A plain tensor beside a DTensor: what counts as replicated, and the error for what does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.tensor.spec import spec_of
from shardwright.tensor.spmd import inside_spmd
from shardwright.tensor.wrap import wrap

if TYPE_CHECKING:
    from shardwright.tensor.dtensor import DTensor


def replicate_plain(x: torch.Tensor, mesh: DeviceMesh, func: torch._ops.OpOverload) -> DTensor:
    """The plain tensor as a replicated DTensor, where that is allowed.

    One-element tensors count as replicated, every plain tensor does inside `spmd` and inside the engine's own
    backward formulas (they make helper tensors, the same on every rank).
    Raises: RuleError: any other plain tensor; the text names the ways out.
    """
    if x.numel() == 1 or inside_spmd() or torch._C._current_graph_task_id() != -1:
        return as_replicated(x, mesh)
    raise RuleError(
        f"{func.name()}: a plain tensor of shape {tuple(x.shape)} beside a DTensor: where does it live?\n"
        "  fix: sw.distribute_tensor(x, mesh, placements)  if every rank (or rank 0) has the whole tensor\n"
        "       sw.DTensor.from_local(x, mesh, placements) if each rank has its own part\n"
        "       with sw.spmd(mesh): ...                    if the block is a single-device program"
    )


def as_replicated(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The DTensor that every rank holds whole; not differentiable."""
    layout = Layout(mesh, (Replicate(),) * mesh.ndim, tuple(x.shape), dtype=x.dtype, stride=tuple(x.stride()))
    return wrap(x.detach(), spec_of(layout, mesh))
