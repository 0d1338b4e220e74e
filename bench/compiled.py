"""A transformer block compiled with inductor, forward and backward: DTensors beside local tensors by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import shardwright as sw
from bench.erased import by_hand, on_dtensors
from bench.turns import calls_for, timed
from shardwright.testing import RankPool, rank_mesh
from shardwright.testing.rank_device import here

_TURNS = 41
_SIZES = ((64, 32, 4), (256, 128, 4))  # width, tokens, rows
Times = dict[str, list[float]]


def run() -> int:
    """Print what was found; 1 if losses differ."""
    console, bad = Console(highlight=False, soft_wrap=True), False
    with RankPool() as pool:
        for ranks in (1, 2):
            for width, tokens, rows in _SIZES:
                found = pool.run(ranks, measure, width, tokens, rows, timeout=900)
                losses, times = found[0][0], [each[1] for each in found]
                slowest = {
                    name: [max(turn) for turn in zip(*(t[name] for t in times), strict=True)]
                    for name in times[0]
                }
                ours, again, hand = (slowest[name] for name in ("DTensors", "DTensors again", "by hand"))
                ratio = median(a / b for a, b in zip(ours, hand, strict=True))
                noise = median(a / b for a, b in zip(ours, again, strict=True))
                console.print(
                    f"{ranks} ranks, width {width}, {rows} x {tokens} tokens: {median(ours) * 1e6:.0f} us "
                    f"beside {median(hand) * 1e6:.0f} ({ratio:.2f}; A against A {noise:.2f}); losses "
                    f"{losses['DTensors']:.6f}, {losses['by hand']:.6f}"
                )
                bad |= abs(losses["DTensors"] - losses["by hand"]) > 1e-4 * abs(losses["by hand"])
    return int(bad)


def measure(width: int, tokens: int, rows: int) -> tuple[dict[str, float], Times]:
    """Both programs in turn, ours twice for the noise: losses, and seconds of each turn."""
    torch.set_num_threads(1)
    world = dist.get_world_size()
    mesh = rank_mesh((world,), ("tp",))
    x = torch.randn(rows, tokens, width, generator=torch.Generator(here()).manual_seed(1))
    given = sw.distribute_tensor(x, mesh, {"tp": sw.Replicate()})
    hand, ours = _compiled(by_hand(width, world)), _compiled(on_dtensors(width, mesh))
    programs: dict[str, Callable[[], Tensor]] = {
        "by hand": lambda: hand(x),
        "DTensors": lambda: ours(given),
        "DTensors again": lambda: ours(given),
    }
    losses = {name: [float(program()) for _ in range(4)][-1] for name, program in programs.items()}
    calls = calls_for(programs["by hand"])
    times: Times = {name: [] for name in programs}
    names, order = list(programs), random.Random(0)
    for _ in range(_TURNS):
        order.shuffle(names)
        for name in names:
            times[name].append(timed(programs[name], calls))
    return losses, times


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Loss and gradients; model and loss are one graph."""
    loss_of = torch.compile(lambda x: model(x).square().mean(), fullgraph=True)

    def step(x: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = loss_of(x)
        loss.backward()
        return loss.detach()

    return step
