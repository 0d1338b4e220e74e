"""Context parallelism beside other strategies: each on its own axis, applied in their order."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import (
    parallelize_context,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
)
from shardwright.testing.meshes import rank_mesh
from tests.models.check import _blocks, compare
from tests.models.configs import BY_NAME, batch_of
from tests.models.tensor_plan import tensor_plan

from .models import Found, whole

LENGTH, STEPS, MOST = 11, 3, 0.1


@dataclass(frozen=True)
class Grid:
    """Axes and sizes of a mesh, in its order; `dp`, `dp2`: whose ranks read other rows."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    data: str = ""  # replicate, fsdp, hsdp; "... over all": units are cut over the context ranks too

    @property
    def data_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis.startswith("dp"))


def place(model: nn.Module, grid: Grid, mesh: DeviceMesh, attention: str) -> None:
    """Tensor, then context, then what spreads the rows."""
    if "tp" in grid.axes:
        sw.distribute_module(model, mesh["tp"], tensor_plan(model))
    parallelize_context(model, mesh["cp"], attention=attention)
    match grid.data:
        case "replicate":
            parallelize_replicate(model, mesh["dp"])
        case "fsdp" | "fsdp over all":
            units = mesh["dp"] if grid.data == "fsdp" else mesh["dp", "cp"]._flatten("dp_cp")
            for block in _blocks(model):
                parallelize_fsdp(block, units)
            parallelize_fsdp(model, units)
        case "hsdp":
            parallelize_hsdp(model, mesh["dp2", "dp"], shard_dim="dp")
        case "hsdp over all":
            mesh["dp", "cp"]._flatten("dp_cp")
            parallelize_hsdp(model, mesh["dp2", "dp_cp"], shard_dim="dp_cp")


def _steps(model: nn.Module, batch: dict[str, Any], share: float, *, summed: bool) -> Found:
    """Gradients before the optimizer, the clipped norm, and the parameters after some steps."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), Found()
    synchronizer = GradientSynchronizer(model) if summed else None
    for step in range(STEPS):
        out = model(**batch)
        (out.loss * share).backward()
        if synchronizer is not None:
            synchronizer.synchronize()
        if step == 0:
            found["loss"] = (out.loss * share).detach()
            found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}
        norm = clip_grad_norm_(model.parameters(), MOST) if summed else _clip(model)
        found[f"norm {step}"] = torch.as_tensor(norm)
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"after steps: {n}": p.detach() for n, p in model.named_parameters()}


def _clip(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), MOST)


def check_grid(name: str, grid: Grid, attention: str = "auto", checkpointed: bool = False) -> list[str]:
    """What differs from one device that reads all rows."""
    warnings.simplefilter("ignore")
    architecture, mesh = BY_NAME[name], rank_mesh(grid.sizes, grid.axes)
    readers = [mesh[axis].size() for axis in grid.data_axes]
    ranks = int(torch.tensor(readers).prod()) if readers else 1
    batch = batch_of(architecture, 2 * ranks, LENGTH)
    plain, model = architecture.build(), architecture.build()
    wanted = _steps(plain, batch, 1.0, summed=False)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    place(model, grid, mesh, attention)
    index = 0
    for axis in grid.data_axes:
        index = index * mesh[axis].size() + mesh.get_local_rank(axis)
    mine = {n: x.tensor_split(ranks)[index] for n, x in batch.items()}
    found = whole(_steps(model, mine, 1.0 / ranks, summed=bool(readers) or True))
    loss = found["loss"]
    assert loss is not None
    for axis in grid.data_axes:
        torch.distributed.all_reduce(loss, group=mesh.get_group(axis))
    return list(compare(found, wanted))
