"""A ring of attention as one writes it by hand, on plain tensors: the peer of `bench context`.

torch's own `context_parallel` has no ring for the kernel of the CPU (its table knows those of CUDA), so this
stands in its place: a balanced cut, half of the keys or queries where that is all that is seen, merging by
the logs of the sums, the next part on its way while one is computed with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def cut(x: Tensor) -> Tensor:
    """The pieces `rank` and `2n - 1 - rank` of the sequence:  [b, h, s, d] -> [b, h, s/n, d]."""
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = x.chunk(2 * n, dim=2)
    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]], dim=2).contiguous()


def _post(flat: Tensor, tag: int) -> tuple[Any, Any, Tensor]:
    n, rank = dist.get_world_size(), dist.get_rank()
    room = torch.empty_like(flat)
    arriving = dist.irecv(room, (rank - 1) % n, tag=tag)
    return arriving, dist.isend(flat, (rank + 1) % n, tag=tag), room


def _arrived(posted: tuple[Any, Any, Tensor]) -> Tensor:
    posted[0].wait()
    posted[1].wait()
    return posted[2]


def _shown(step: int, half: int) -> tuple[slice, slice, bool]:
    """Queries, keys and whether the block is causal, of the part at hand in a step."""
    rank, every = dist.get_rank(), slice(0, 2 * half)
    if step == 0:
        return every, every, True
    return (every, slice(0, half), False) if step <= rank else (slice(half, 2 * half), every, False)


class HandRing(torch.autograd.Function):
    """Causal attention:  three times [b, h, s/n, d] -> [b, h, s/n, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values go round."""
        n, half, flat = dist.get_world_size(), q.shape[2] // 2, torch.stack([k, v])
        out = torch.zeros_like(q)
        logs = q.new_full(q.shape[:3], -torch.inf)
        for step in range(n):
            posted = _post(flat, 1) if step + 1 < n else None
            rows, keys, causal = _shown(step, half)
            part, log = _FORWARD(q[:, :, rows], flat[0][:, :, keys], flat[1][:, :, keys], 0.0, causal)
            both = torch.logaddexp(logs[:, :, rows], log)
            out[:, :, rows] *= (logs[:, :, rows] - both).exp()[..., None]
            out[:, :, rows] += part * (log - both).exp()[..., None]
            logs[:, :, rows] = both
            flat = flat if posted is None else _arrived(posted)
        ctx.save_for_backward(q, k, v, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Again; the terms of their gradients follow."""
        q, k, v, out, logs = ctx.saved_tensors
        n, half, flat = dist.get_world_size(), q.shape[2] // 2, torch.stack([k, v])
        of_q, own, under_way = torch.zeros_like(q), torch.zeros_like(flat), None
        for step in range(n):
            posted = _post(flat, 1) if step + 1 < n else None
            rows, keys, causal = _shown(step, half)
            log = logs[:, :, rows].transpose(1, 2).contiguous().transpose(1, 2)
            given = (grad[:, :, rows], q[:, :, rows], flat[0][:, :, keys], flat[1][:, :, keys])
            terms = _BACKWARD(*given, out[:, :, rows], log, 0.0, causal)
            of_q[:, :, rows] += terms[0]
            made = own if step == 0 else torch.zeros_like(flat)
            made[0][:, :, keys] += terms[1]
            made[1][:, :, keys] += terms[2]
            if step:
                if under_way is not None:
                    made += _arrived(under_way)
                under_way = _post(made, 2)
            flat = flat if posted is None else _arrived(posted)
        if under_way is not None:
            own += _arrived(under_way)
        return of_q, own[0], own[1]
