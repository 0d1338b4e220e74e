"""Batch norm of the whole batch: statistics over the ranks that hold other rows of it."""

from __future__ import annotations

from types import MappingProxyType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.collectives import all_reduce
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.grads.stages import heard_by_stages
from shardwright.parallel.meshes import named_axes
from shardwright.parallel.pipeline.mark import is_cut
from shardwright.placement.base import Replicate
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.modules.same_model import agreed

_VERB, _REASON = "parallelize_batch_norm", "statistics of batch norm"
_OVER = "_statistics_over"
_Norm = nn.BatchNorm1d  # all of them have its attributes and its forward
_NORMS = MappingProxyType({nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)})
_ROWS = (
    "{}: a batch norm over data ranks takes the rows of its rank, and got a DTensor of several of them\n"
    "  fix: leave batch norms to rank-local modules, or cut the batch as a DTensor and leave "
    "parallelize_batch_norm out: its statistics are then those of the whole tensor"
)
_OTHERS = (nn.SyncBatchNorm, nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


@heard_by_stages
def parallelize_batch_norm(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let every batch norm inside `module` see the whole batch, which is cut by rows over all axes of `mesh`.

    In training, mean and variance are those of the rows of all ranks, uneven and empty parts included, and
    the running buffers move alike on every rank. In evaluation nothing is sent. The class, parameters,
    buffers and names of a batch norm stay; its forward is another (an attribute of the object). It places no
    parameter: that is what a data-parallel strategy does, before or after.

    Args:
        mesh: the axes over which the rows of the batch are spread: those of data parallelism.
    Returns: the module itself.
    Raises: ParallelError: no batch norm inside, a lazy one that has no size yet, `SyncBatchNorm`, one that
        sees the whole batch already, a forward that somebody replaced, ranks with other batch norms; nothing
        has been changed then.
    Cost: an all-reduce of 40 bytes over each axis, once; in a forward in training two all-reduces of a number
        for each channel, and in its backward two; every rank runs both.
    Source: the formula of Ioffe and Szegedy, arXiv 1502.03167, algorithm 1, over the whole batch.
    """
    with agreed(_VERB, module, mesh) as said:
        named_axes(mesh, _VERB, module)
        found = {path or "the module": m for path, m in module.named_modules() if is_batch_norm(m)}
        if not found and not is_cut(module):
            raise ParallelError(f"{_VERB}: no batch norm of torch inside {type(module).__name__}")
        norms = [_checked(norm, path) for path, norm in found.items()]
        said.options = {"norms": list(found)}
    over = _Ranks(tuple(groups_above_one(mesh)))
    for norm in norms:
        setattr(norm, _OVER, over)
        norm.forward = MethodType(_forward, norm)  # type: ignore[method-assign]  # of this object alone
    return module


class _Ranks:
    """The groups that statistics are summed over. A copied module has the same peers."""

    def __init__(self, groups: tuple[tuple[str, ProcessGroup], ...]) -> None:
        self.groups = groups

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks; differentiable; what is cut over others is finished there first.  [...] -> [...]"""
        if isinstance(x, TorchDTensor):
            whole = (Replicate(),) * x.device_mesh.ndim
            local = x.redistribute(placements=whole).to_local()
            return DTensor.from_local(self.sum(local), x.device_mesh, whole)
        for axis, group in self.groups:
            x = all_reduce(x, "sum", group, axis=axis, reason=_REASON)
        return x

    def refuse_rows_among(self, x: Tensor, norm: nn.Module) -> None:
        """Raise ParallelError for a DTensor over two of the ranks: its rows may be all that they have."""
        here = set(x.device_mesh.mesh.flatten().tolist()) if isinstance(x, TorchDTensor) else set()
        if any(len(here.intersection(get_process_group_ranks(group))) > 1 for _, group in self.groups):
            raise ParallelError(_ROWS.format(type(norm).__name__))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Ranks:
        return self


def is_batch_norm(module: nn.Module) -> bool:
    """Is it a batch norm of torch, of whatever kind?"""
    return isinstance(module, (*_NORMS, *_OTHERS))


def _checked(norm: nn.Module, path: str) -> _Norm:
    if hasattr(norm, _OVER):
        raise ParallelError(f"{_VERB}: {path} sees the whole batch already; apply it once")
    if isinstance(norm, _OTHERS) or not isinstance(norm, tuple(_NORMS)):
        kind = type(norm).__name__
        raise ParallelError(f"{_VERB}: {path} is a {kind}; give it a BatchNorm of torch that has its size")
    if "forward" in vars(norm) or type(norm).forward is not nn.BatchNorm1d.forward:
        raise ParallelError(f"{_VERB}: {path} has a forward of its own, which would be lost")
    return cast("_Norm", norm)


def _forward(norm: _Norm, x: Tensor) -> Tensor:
    """[rows, channels, ...] -> the same; rows of this rank, which other axes may cut otherwise."""
    running: Tensor | None = norm.running_mean
    if not norm.training and running is not None:
        return type(norm).forward(norm, x)
    over: _Ranks = getattr(norm, _OVER)
    over.refuse_rows_among(x, norm)
    dims = next(dims for kind, dims in _NORMS.items() if kind in type(norm).__mro__)
    if x.ndim not in dims or x.shape[1] != norm.num_features:
        raise ValueError(
            f"{type(norm).__name__}({norm.num_features}) got an input of shape {tuple(x.shape)}: expected "
            f"{' or '.join(map(str, dims))} dims, the second of {norm.num_features}"
        )
    mean, variance, count = _statistics(x, over)
    if norm.training:
        _follow(norm, mean.detach(), variance.detach(), count)
    shape = (1, -1, *([1] * (x.ndim - 2)))
    scale = (variance + norm.eps).rsqrt()
    out = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
    out = out.to(x.dtype)
    weight, bias = cast("tuple[Tensor | None, Tensor | None]", (norm.weight, norm.bias))
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _statistics(x: Tensor, over: _Ranks) -> tuple[Tensor, Tensor, float]:
    """Mean and variance of each channel, and how many elements it has on all ranks."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    per_channel = x.numel() // x.shape[1] if x.shape[1] else 0
    # The number travels with the sums: one message less, and ranks of other sizes need not ask.
    sent = over.sum(torch.cat([wide.sum(dims), wide.new_full((1,), float(per_channel))]))
    total = sent[-1].detach()
    count = float(total)
    if count <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {count:.0f} on all ranks together"
        )
    mean = sent[:-1] / total
    centered = wide - mean.view(1, -1, *([1] * (x.ndim - 2)))
    return mean, over.sum(centered.square().sum(dims)) / total, count


@torch.no_grad()
def _follow(norm: _Norm, mean: Tensor, variance: Tensor, count: float) -> None:
    """The running buffers, as torch moves them: the variance that they follow is the unbiased one."""
    buffers: tuple[Tensor | None, ...] = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    means, variances, batches = buffers
    if means is None or variances is None or batches is None:  # track_running_stats=False
        return
    batches.add_(1)
    rate = 1.0 / float(batches) if norm.momentum is None else norm.momentum
    means.lerp_(mean.to(means.dtype), rate)
    variances.lerp_((variance * (count / (count - 1))).to(variances.dtype), rate)
