"""A training step of a mixture of experts spread over the ranks, beside the same written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from bench.turns import Found, Step, in_turns, told
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize_expert_parallel
from shardwright.testing import RankPool, rank_mesh

_DIM, _HIDDEN, _EXPERTS, _TOP_K, _TOKENS = 256, 512, 8, 2, 2048
_RATE = 1e-3


def run() -> int:
    """Print what was found on 2 and 4 ranks; 1 if a loss is not that of one device."""
    console, bad = Console(highlight=False, soft_wrap=True), False
    with RankPool() as pool:
        for ranks in (2, 4):
            bad |= not told(console, f"experts over {ranks} ranks", pool.run(ranks, measure, timeout=600))
    return int(bad)


def measure() -> Found:
    """Our layer beside the one by hand."""
    torch.set_num_threads(1)
    x = torch.randn(_TOKENS, _DIM, generator=torch.Generator().manual_seed(1))
    rows = x.tensor_split(dist.get_world_size())[dist.get_rank()]
    return in_turns(_ours(rows), _by_hand(rows), _one_device(x))


def _layer() -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(_DIM, _HIDDEN, _EXPERTS, _TOP_K)


def _ours(rows: Tensor) -> Step:
    mesh = rank_mesh((dist.get_world_size(),), ("ep_shard",))
    layer = parallelize_expert_parallel(_layer(), mesh)
    synchronizer = GradientSynchronizer(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=_RATE)

    def step() -> Tensor:
        loss = global_mean(layer(rows).square().sum(), rows.numel(), mesh)
        with synchronizer.overlapped():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _one_device(x: Tensor) -> Step:
    layer = _layer()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=_RATE)

    def step() -> Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        sent, received = ctx.splits
        return _Exchange.apply(gradient, received, sent), None, None


class _ByHand(nn.Module):
    """This rank's experts as plain tensors, and the exchanges of tokens written out."""

    def __init__(self, whole: MoELayer) -> None:
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.world = world
        self.router = nn.Parameter(whole.router.weight.detach().clone())
        own = [getattr(whole.experts, name).weight.detach() for name in ("gate", "up", "down")]
        self.gate, self.up, self.down = (nn.Parameter(w.chunk(world)[rank].clone()) for w in own)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, dim] to the same."""
        weights, chosen = functional.linear(x, self.router).softmax(-1).topk(_TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        pair_of = chosen.flatten()
        order = pair_of.argsort(stable=True)
        token_of = order // _TOP_K
        counts = torch.bincount(pair_of, minlength=_EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = (c.view(self.world, -1).sum(1).tolist() for c in (counts, arriving))
        rows = _Exchange.apply(x.index_select(0, token_of), sent, received)
        expert = torch.arange(_EXPERTS // self.world).repeat(self.world).repeat_interleave(arriving)
        sorting = expert.argsort(stable=True)
        undo = torch.empty_like(sorting).scatter_(0, sorting, torch.arange(len(sorting)))
        ends = arriving.view(self.world, -1).sum(0).cumsum(0).int()
        done = self._experts(rows.index_select(0, sorting), ends)
        back = _Exchange.apply(done.index_select(0, undo), received, sent)
        weighted = back * weights.flatten().index_select(0, order).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token_of, weighted)

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        inner = functional.silu(functional.grouped_mm(rows, self.gate, offs=ends))
        return functional.grouped_mm(
            inner * functional.grouped_mm(rows, self.up, offs=ends), self.down, offs=ends
        )


def _by_hand(rows: Tensor) -> Step:
    layer = _ByHand(_layer())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=_RATE)
    elements = rows.numel() * dist.get_world_size()

    def step() -> Tensor:
        loss = layer(rows).square().sum() / elements
        loss.backward()
        dist.all_reduce(layer.router.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total

    return step
