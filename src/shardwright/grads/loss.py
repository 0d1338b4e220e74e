"""Losses whose gradients are right when the ranks' gradients are added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError


def global_mean(loss_sum: Tensor, count: int | Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean over all ranks' items, sum of `loss_sum` / sum of `count`:  [] -> [].

    The value is the global mean, the same on every rank (log it as it is). Its gradient with respect to this
    rank's `loss_sum` is 1 / (global count): adding up the ranks' gradients, as every strategy here does,
    gives the gradient of the global mean, for counts that differ and for ranks that count nothing. An average
    of local means would be neither. If nobody counts anything the value and the gradient are 0.

    Args:
        loss_sum: the sum (not the mean) of this rank's losses, a plain scalar; without items, 0 with a graph.
        count: how many items this rank summed.
        mesh: the axes whose ranks have different items (data and context ranks, not tensor-parallel ones).

    Raises:
        ParallelError: `loss_sum` is no plain scalar.

    Cost: one all-reduce of 16 bytes per axis forward, nothing backward.
    """
    if isinstance(loss_sum, TorchDTensor) or loss_sum.numel() != 1:
        raise ParallelError(
            f"global_mean takes this rank's sum of losses as a plain scalar, got {type(loss_sum).__name__} "
            f"of shape {tuple(loss_sum.shape)}; sum the local losses first (a DTensor is global already)"
        )
    local = torch.stack([loss_sum.detach().double().reshape(()), _as_double(count, loss_sum.device)])
    for axis, group in groups_above_one(mesh):
        local = reduce_over(local, "sum", group, axis=axis, reason="global mean of the loss")
    total, items = local.unbind()
    items = items.clamp(min=1.0)
    mean: Tensor = _GlobalMean.apply(loss_sum, (total / items).to(loss_sum.dtype), items)  # type: ignore[no-untyped-call]
    return mean


def _as_double(count: int | Tensor, device: torch.device) -> Tensor:
    """Return a count as a 0-d float64 tensor, in which every count is exact."""
    return torch.as_tensor(count, dtype=torch.float64, device=device).detach().reshape(())


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, mean: Tensor, items: Tensor) -> Tensor:
        ctx.items = items
        return mean.reshape(loss_sum.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient / ctx.items).to(gradient.dtype), None, None
