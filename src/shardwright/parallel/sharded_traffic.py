"""What `fully_shard` sends: in the record beside everything else, and no more than it must.

torch issues these collectives; its hook for custom communication is where they are seen, and done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.comm import guard
from shardwright.comm.functional import reduce_scatter_rows
from shardwright.comm.record import Sending, recording
from shardwright.comm.tap import GroupCall
from shardwright.compat.fully_shard.traffic import DefaultAllGather, DefaultReduceScatter

_PARAMETERS, _GRADIENTS = "parameters of a sharded unit", "gradients of a sharded unit"


class RecordedAllGather(DefaultAllGather):
    """torch's all-gather of parameters, recorded."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` into `output_tensor`. Cost: each rank sends its part to n-1 peers."""
        with _sending("all_gather", self.axis, input_tensor, group, (group.size() - 1) * input_tensor.nbytes):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class ExchangedReduceScatter(DefaultReduceScatter):
    """The sum of gradients as one exchange of terms on the CPU, elsewhere torch's reduce-scatter; recorded.

    gloo has no reduce-scatter of its own: torch all-reduces a copy there, twice the bytes.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def __call__(  # type: ignore[override]  # nobody waits for what is done
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum `input_tensor` into `output_tensor`. Cost: each rank sends (n-1)/n of the input."""
        n = group.size()
        if op == dist.ReduceOp.SUM and input_tensor.device.type == "cpu" and not async_op and n > 1:
            if guard.on:  # messages between pairs may be of any size; the terms of a sum are alike
                guard.check_call(GroupCall("_reduce_scatter_base_", (output_tensor, input_tensor), group))
            parts = [output_tensor.numel()] * n
            mine = reduce_scatter_rows(input_tensor, parts, group, axis=self.axis, reason=_GRADIENTS)
            output_tensor.copy_(mine)
            return None
        sent = input_tensor.nbytes * (n - 1) // n
        with _sending("reduce_scatter", self.axis, input_tensor, group, sent):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


def record_sharded_traffic(unit: nn.Module, axis: str) -> None:
    """Record what a sharded unit sends over `axis` from now on. A user's own hooks, set later, replace it."""
    if isinstance(unit, FSDPModule):
        unit.set_custom_all_gather(RecordedAllGather(axis))
        unit.set_custom_reduce_scatter(ExchangedReduceScatter(axis))


def _sending(
    op: str, axis: str, x: Tensor, group: dist.ProcessGroup, sent: int
) -> AbstractContextManager[None]:
    if group.size() == 1 or not recording():
        return nullcontext()
    reason = _PARAMETERS if op == "all_gather" else _GRADIENTS
    return Sending(op, axis=axis, bytes_sent=sent, reason=reason, shape=tuple(x.shape), dtype=x.dtype)
