"""Losses whose gradients are right when the ranks' gradients are added up."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over
from shardwright.comm.told import told
from shardwright.comm.traced import is_traced
from shardwright.compat import axis_names
from shardwright.context.submesh import groups_above_one, refuse_outside
from shardwright.errors import ParallelError
from shardwright.placement.base import Replicate
from shardwright.tensor.modules.more_axes import shared_ranks
from shardwright.tensor.wrap import as_ours


def global_mean(loss_sum: Tensor, count: int | Tensor, mesh: DeviceMesh) -> Tensor:
    """The mean over all ranks' items, sum of `loss_sum` / sum of `count`:  [] -> [].

    The value is the global mean, the same on every rank (log it as it is). Its gradient with respect to this
    rank's `loss_sum` is 1 / (global count): adding up the ranks' gradients, as every strategy here does,
    gives the gradient of the global mean, for counts that differ and for ranks that count nothing. An average
    of local means would be neither. If nobody counts anything the value and the gradient are 0.

    Args:
        loss_sum: the sum (not the mean) of this rank's losses, a scalar; without items, 0 with a graph. A
            DTensor is global on its own axes (those of tensor parallelism), which are none of `mesh`'s.
        count: how many items this rank summed.
        mesh: the axes whose ranks have different items (data and context ranks, not tensor-parallel ones).
    Returns: a plain scalar; of whole numbers (how many were right) in torch's default dtype.

    Raises:
        ParallelError: `loss_sum` is no scalar, or a DTensor that is global over ranks of `mesh` already; this
            rank is none of the mesh's; another rank raises one (on a GPU, and in a compiled graph, the mean
            is NaN instead, for nobody waits for the device there).

    Cost: one all-reduce of 16 bytes per axis forward, nothing backward; of a pending DTensor one all-reduce
        of the scalar more.
    """
    try:
        _check(loss_sum, count, mesh)
        loss_sum, count = _whole(loss_sum), _whole(count)
    except Exception:  # whatever it is, the other ranks wait
        _tell_lost(mesh)
        raise
    items = torch.as_tensor(count, dtype=torch.float64, device=loss_sum.device)  # every count is exact there
    local = torch.stack([loss_sum.detach().double().reshape(()), items.detach().reshape(())])
    total, items = _added(local, mesh).unbind()
    _refuse_lost(items, mesh)
    items = items.clamp(min=1.0)
    dtype = loss_sum.dtype if loss_sum.is_floating_point() else torch.get_default_dtype()
    mean: Tensor = _GlobalMean.apply(loss_sum, (total / items).to(dtype), items)  # type: ignore[no-untyped-call]
    return mean


def _added(local: Tensor, mesh: DeviceMesh) -> Tensor:
    for axis, group in groups_above_one(mesh):
        local = reduce_over(local, "sum", group, axis=axis, reason="global mean of the loss")
    return local


def _tell_lost(mesh: object) -> None:
    """Add what `_refuse_lost` finds on the other ranks of a mesh, if it is one that has this rank."""
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is not None:
        _added(torch.tensor([math.nan, -math.inf], dtype=torch.float64, device=mesh.device_type), mesh)


def _refuse_lost(items: Tensor, mesh: DeviceMesh) -> None:
    """Raise ParallelError where a rank of the mesh has no count to add.

    Read where that waits for no device: elsewhere, and in a graph, the mean is NaN then.
    """
    if torch.compiler.is_compiling() or is_traced(items) or items.device.type != "cpu":
        return
    if not told(items.isfinite()):
        raise ParallelError(
            f"global_mean over {axis_names(mesh)}: a rank has no sum of losses or no count to add, as its "
            "own error says, or its count is NaN or infinite"
        )


def _check(loss_sum: Any, count: Any, mesh: DeviceMesh) -> None:
    """Raise ParallelError for what has no mean over the ranks of `mesh`."""
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        shape = tuple(loss_sum.shape) if isinstance(loss_sum, Tensor) else ()
        got = f"{type(loss_sum).__name__} of shape {shape}"
        raise ParallelError(
            f"global_mean takes this rank's sum of losses as a scalar, got {got}; sum the losses first"
        )
    many = count.numel() != 1 if isinstance(count, Tensor) else not isinstance(count, Real | torch.SymInt)
    if many or isinstance(count, bool) or (not isinstance(count, Tensor) and not 0 <= count < math.inf):
        raise ParallelError(f"global_mean takes how many items this rank summed, got {count!r:.60}")
    if not isinstance(mesh, DeviceMesh):
        raise ParallelError(f"global_mean takes the mesh of ranks that have other items, got {mesh!r:.60}")
    refuse_outside(mesh, "global_mean", ParallelError)
    if isinstance(loss_sum, TorchDTensor) and shared_ranks(loss_sum.device_mesh, mesh):
        raise ParallelError(
            f"global_mean over {axis_names(mesh)}: the loss lives on {axis_names(loss_sum.device_mesh)} and "
            "is global over these ranks already; divide it by the global count, or pass the axes whose ranks "
            "have other items"
        )


def _whole(value: Any) -> Any:
    """The finished value of a DTensor as a plain tensor, whose gradient is the same on all of its ranks."""
    if not isinstance(value, TorchDTensor):
        return value
    ours = as_ours(value) if not value.requires_grad else value
    return ours.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()


class _GlobalMean(torch.autograd.Function):
    same_on_all_ranks = True

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, mean: Tensor, items: Tensor) -> Tensor:
        ctx.items = items
        return mean.reshape(loss_sum.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (gradient / ctx.items).to(gradient.dtype), None, None
