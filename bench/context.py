"""Causal attention over a cut sequence, forward and backward, beside a ring by hand; what a ring overlaps.

What a ring hides is seen on links that take time and no processor: the kernel paces the sockets of the ranks
to a rate. Without that, messages between processes of one machine are copies by the cores that compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import shardwright as sw
from bench.hand_ring import HandRing, cut
from bench.links import LINK, medians_at
from bench.turns import Found, Step, in_turns, told
from shardwright.comm.ring import Ring
from shardwright.tensor.attention.asked import attention_by
from shardwright.testing import RankPool, rank_mesh

_HEADS, _WIDTH, _TURNS = 8, 64, 11
_LENGTHS = (512, 2048)
_RANKS = (2, 4)


def run() -> int:
    """Print what was found; 1 if a result is not that of one device."""
    console, bad = Console(highlight=False, soft_wrap=True), False
    with RankPool() as pool:
        for ranks in _RANKS:
            for length in _LENGTHS:
                for way in ("ring", "all_to_all"):
                    found = pool.run(ranks, beside_hand, way, length, timeout=600)
                    bad |= not told(console, f"{way} of {length} positions, {ranks} ranks", found)
                for rate in (None, LINK):
                    seen = pool.run(ranks, overlap, length, rate, timeout=600)
                    free, blocking, alone = (max(times) * 1e3 for times in zip(*seen, strict=True))
                    links = f"links of {rate / 1e6:.0f} MB/s" if rate else "links as they are"
                    console.print(
                        f"ring of {length} positions, {ranks} ranks, {links}: {free:.1f} ms, {blocking:.1f} "
                        f"with blocking sends; its messages alone take {alone:.1f} ms; hidden: "
                        f"{(blocking - free) / alone:.0%}"
                    )
    return int(bad)


def _operands(length: int) -> list[Tensor]:
    """Queries, keys, values, and a gradient for the result."""
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(1)
    return [torch.randn(1, _HEADS, length, _WIDTH, generator=made) for _ in range(4)]


def _step(operands: Sequence[Tensor], attend: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
    """Forward and backward: the result and the gradients, as they lie on this rank."""
    *leaves, cotangent = operands
    leaves = [x.requires_grad_() for x in leaves]

    def step() -> list[Tensor]:
        out = attend(*leaves)
        found = [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
        return [x.to_local() if isinstance(x, sw.DTensor) else x for x in found]

    return step


def _ours(length: int, way: str, *, blocking: bool = False) -> Callable[[], list[Tensor]]:
    mesh = rank_mesh((dist.get_world_size(),), ("cp",))

    def attend(*operands: Tensor) -> Tensor:
        with attention_by(way, blocking=blocking):
            return scaled_dot_product_attention(*operands, is_causal=True)

    return _step([sw.distribute_tensor(x, mesh, [sw.ZigZag(2)]) for x in _operands(length)], attend)


def _by_hand(length: int) -> Callable[[], list[Tensor]]:
    return _step([cut(x) for x in _operands(length)], lambda *x: cast("Tensor", HandRing.apply(*x)))


def _loss(step: Callable[[], list[Tensor]]) -> Step:
    """One number that all elements have a part in, for the comparison with one device."""

    def loss() -> Tensor:
        total = torch.stack([x.square().sum() for x in step()]).sum()
        dist.all_reduce(total)
        return total

    return loss


def beside_hand(way: str, length: int) -> Found:
    """Our step, the one by hand, one device."""
    alone = _step(_operands(length), lambda *x: scaled_dot_product_attention(*x, is_causal=True))
    return in_turns(
        _loss(_ours(length, way)),
        _loss(_by_hand(length)),
        lambda: torch.stack([x.square().sum() for x in alone()]).sum(),
    )


def overlap(length: int, rate: int | None) -> tuple[float, float, float]:
    """Seconds of a step, of one that waits for each message before it computes, and of the messages alone.

    rate: bytes per second that a rank sends; None: as fast as it can.
    """
    steps = [_ours(length, "ring"), _ours(length, "ring", blocking=True), _messages(length)]
    for step in steps:
        step()  # whoever talks to each other is connected now
    free, blocking, alone = medians_at(rate, steps, _TURNS)
    return free, blocking, alone


def _messages(length: int) -> Callable[[], None]:
    n = dist.get_world_size()
    ring = Ring(tuple(range(n)), dist.get_rank(), None, "cp", "messages alone", blocking=True)
    part = torch.zeros(2 * _HEADS * _WIDTH * length // n)

    def send() -> None:
        for lane in (
            0,
            0,
            1,
        ):  # the forward; keys and values of the backward, and the terms of their gradients
            for _ in range(n - 1):
                ring.pass_on(part, part.numel(), lane=lane)

    return send
