"""What `fully_shard` sends, in the record of communication beside everything else.

torch issues these collectives itself; its hook for custom communication is where they can be seen.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.comm.record import Sending, recording
from shardwright.compat.fully_shard_traffic import DefaultAllGather, DefaultReduceScatter


class RecordedAllGather(DefaultAllGather):
    """torch's all-gather of parameters, recorded."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` into `output_tensor`. Cost: each rank sends its part to n-1 peers."""
        sent = (group.size() - 1) * input_tensor.nbytes
        with _sending("all_gather", self.axis, input_tensor, group, sent):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class RecordedReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter of gradients, recorded."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Sum `input_tensor` into `output_tensor`. Cost: each rank sends (n-1)/n of the input."""
        sent = input_tensor.nbytes * (group.size() - 1) // group.size()
        with _sending("reduce_scatter", self.axis, input_tensor, group, sent):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def record_sharded_traffic(unit: nn.Module, axis: str) -> None:
    """Record what a sharded unit sends over `axis` from now on. A user's own hooks, set later, replace it."""
    if isinstance(unit, FSDPModule):
        unit.set_custom_all_gather(RecordedAllGather(axis))
        unit.set_custom_reduce_scatter(RecordedReduceScatter(axis))


def _sending(
    op: str, axis: str, x: Tensor, group: dist.ProcessGroup, sent: int
) -> AbstractContextManager[None]:
    if group.size() == 1 or not recording():
        return nullcontext()
    reason = "parameters of a sharded unit" if op == "all_gather" else "gradients of a sharded unit"
    return Sending(op, axis=axis, bytes_sent=sent, reason=reason, shape=tuple(x.shape), dtype=x.dtype)
