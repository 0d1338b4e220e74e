"""Planted faults: each damages the gradients of a step, and must go red."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial

import shardwright as sw


@torch.no_grad()
def doubled_on_one_rank(model: nn.Module) -> None:
    """One rank's part of one gradient counts twice."""
    gradient = max((p.grad for p in model.parameters() if p.grad is not None), key=lambda g: g.numel())
    if dist.get_rank() == 1:
        gradient._local_tensor.mul_(2)


@torch.no_grad()
def averaged(model: nn.Module) -> None:
    """An average over all ranks where a sum was wanted."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(dist.get_world_size())


@torch.no_grad()
def never_summed(model: nn.Module) -> None:
    """Terms that are called finished."""
    for p in model.parameters():
        if isinstance(p.grad, TorchDTensor):
            placed = tuple(sw.Replicate() if isinstance(g, Partial) else g for g in p.grad.placements)
            local, mesh = p.grad._local_tensor, p.grad.device_mesh
            p.grad = sw.DTensor.from_local(local, mesh, placed, shape=p.shape, stride=p.stride())


@torch.no_grad()
def stale_on_one_rank(model: nn.Module) -> None:
    """One rank starts from another weight than its peers."""
    if dist.get_rank() == 1:
        parameter = list(model.parameters())[-1]
        parameter._local_tensor.add_(1e-2)
