"""A whole training step of an unmodified decoder under tensor parallelism, beside torch's styles."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import shardwright as sw
from shardwright.testing import RankPool, rank_mesh
from tests.witness.witness import Asked, Witness

_WIDTH, _HEADS, _LAYERS, _TOKENS, _ROWS = 256, 8, 4, 128, 8
_COLUMNS = ("q", "k", "v", "gate", "up")
_PLACES = dict.fromkeys(("q", "k", "v", "o"), "attention") | dict.fromkeys(("gate", "up", "down"), "mlp")
_TURNS, _STEPS = 15, 5
_ORDER = (0, 1, 0)  # ours, theirs, ours once more


class Attention(nn.Module):
    """Causal, without biases; as many heads as its matrices have rows for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        heads = (p(x).unflatten(-1, (-1, _WIDTH // _HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(_WIDTH, 4 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Two residual branches."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(_WIDTH), Attention()
        self.before_mlp, self.mlp = nn.RMSNorm(_WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, width] to the same."""
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


def decoder() -> nn.Module:
    """The blocks and a norm; the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(_LAYERS)), nn.RMSNorm(_WIDTH))


@dataclass(frozen=True)
class Found:
    """What one rank saw: seconds per turn, collectives, bytes sent, losses of ours, theirs, one device."""

    ours: list[float]
    theirs: list[float]
    again: list[float]
    counts: tuple[int, int]
    sent: tuple[float, float]
    losses: list[float]


def run() -> int:
    """Print what was found; 1 if losses differ, or there are more collectives than with torch's styles."""
    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    with RankPool() as pool:
        for ranks in (2, 4):
            found = pool.run(ranks, measure, timeout=600)
            bad |= _print(console, ranks, found)
    return bad


def measure() -> Found:
    """Steps of both in turn, ours once more for the noise; and one device, for the loss."""
    torch.set_num_threads(1)
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    x = torch.randn(_ROWS, _TOKENS, _WIDTH, generator=torch.Generator().manual_seed(1))
    ours = sw.distribute_module(
        decoder(),
        mesh,
        {f"*.{name}.weight": {"tp": sw.Shard(0)} for name in _COLUMNS}
        | {f"*.{name}.weight": {"tp": sw.Shard(1)} for name in ("o", "down")},
    )
    theirs = _in_styles(decoder(), mesh)
    steps = [_step(ours, x, mesh), _step(theirs, x), _step(decoder(), x)]
    for _ in range(_STEPS):
        losses = [float(step()) for step in steps]
    counted = [_counted(step) for step in steps[:2]]
    times: list[list[float]] = [[], [], []]
    for turn in range(_TURNS):
        for place in range(3):
            index = (turn + place) % 3
            times[index].append(_timed(steps[_ORDER[index]]))
    counts, sent = zip(*counted, strict=True)
    return Found(times[0], times[1], times[2], counts, sent, losses)


def _step(model: nn.Module, x: Tensor, mesh: object = None) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        if mesh is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            with sw.spmd(mesh):
                loss = model(x).square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _in_styles(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {f"{_PLACES[name]}.{name}": ColwiseParallel() for name in _COLUMNS}
    plan |= {f"{_PLACES[name]}.{name}": RowwiseParallel() for name in ("o", "down")}
    for block in list(model.children())[:-1]:
        parallelize_module(block, mesh, plan)
    return model


def _counted(step: Callable[[], object]) -> tuple[int, float]:
    """Collectives of a step, and the bytes that this rank sends."""
    with Witness() as witness:
        step()
    return len(witness.asked), sum(map(_sent, witness.asked))


def _sent(asked: Asked) -> float:
    """What the usual algorithms send."""
    n = dist.get_world_size()
    if asked.kind == "all_to_all":
        total = sum(asked.splits)
        return asked.given * (total - asked.splits[dist.get_rank()]) / total if total else 0
    factors = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "reduce_scatter": (n - 1) / n, "send": 1}
    return factors.get(asked.kind, 0) * asked.given


def _timed(step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _print(console: Console, ranks: int, found: list[Found]) -> int:
    """Of every turn the slowest rank counts."""
    ours, theirs, again = (
        [max(turn) for turn in zip(*times, strict=True)]
        for times in ([f.ours for f in found], [f.theirs for f in found], [f.again for f in found])
    )
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    noise = median(a / b for a, b in zip(ours, again, strict=True))
    counts, sent = found[0].counts, found[0].sent
    mine, other, one = found[0].losses
    console.print(
        f"{ranks} ranks: {counts[0]} collectives beside {counts[1]}, {sent[0] / 2**20:.1f} MiB beside "
        f"{sent[1] / 2**20:.1f} ({sent[0] / sent[1]:.2f}), {median(ours) * 1e3:.0f} ms beside "
        f"{median(theirs) * 1e3:.0f} ({ratio:.2f}; A against A {noise:.2f}); losses {mine:.6f}, {other:.6f}, "
        f"one device {one:.6f}"
    )
    return int(abs(mine - one) > 1e-3 * abs(one) or counts[0] > counts[1])
