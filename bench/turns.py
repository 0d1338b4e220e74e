"""Two ways to make a training step, in turns: time, collectives, bytes and losses of both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from shardwright.testing.rank_device import here
from tests.witness.witness import Asked, Witness

Step = Callable[[], Tensor]
_TURNS, _STEPS = 15, 5
_ORDER = (0, 1, 0)  # ours, theirs, ours once more


@dataclass(frozen=True)
class Found:
    """What one rank saw: seconds per turn, collectives, bytes sent, losses of ours, theirs, one device."""

    ours: list[float]
    theirs: list[float]
    again: list[float]
    counts: tuple[int, int]
    sent: tuple[float, float]
    losses: list[float]


def in_turns(ours: Step, theirs: Step, one_device: Step) -> Found:
    """Steps of both in turn, ours once more for the noise; and one device, for the loss."""
    steps = [ours, theirs, one_device]
    for _ in range(_STEPS):
        losses = [float(step()) for step in steps]
    counted = [_counted(step) for step in steps[:2]]
    times: list[list[float]] = [[], [], []]
    for turn in range(_TURNS):
        for place in range(3):
            index = (turn + place) % 3
            times[index].append(timed(steps[_ORDER[index]]))
    counts, sent = zip(*counted, strict=True)
    return Found(times[0], times[1], times[2], counts, sent, losses)


def _counted(step: Step) -> tuple[int, float]:
    """Collectives of a step, and the bytes that this rank sends."""
    with Witness() as witness:
        step()
    return len(witness.asked), sum(map(_sent, witness.asked))


def _sent(asked: Asked) -> float:
    """What the usual algorithms send."""
    n = dist.get_world_size()
    if asked.kind == "all_to_all":
        total = sum(asked.splits)
        own = asked.splits[dist.get_rank() % len(asked.splits)] if asked.splits else 0  # of the last axis
        return asked.given * (total - own) / total if total else 0
    factors = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "reduce_scatter": (n - 1) / n, "send": 1}
    return factors.get(asked.kind, 0) * asked.given


def timed(step: Callable[[], object], calls: int = 1) -> float:
    """Seconds of a call, from when all ranks are there."""
    dist.barrier()
    _finish()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    _finish()
    return (time.perf_counter() - start) / calls


def _finish() -> None:
    """Wait for what an accelerator still computes."""
    if here().type != "cpu":
        torch.accelerator.synchronize()


def calls_for(step: Callable[[], object], seconds: float = 0.02) -> int:
    """How many calls take so long, as rank 0 finds: with numbers of their own, ranks would wait forever."""
    said = torch.tensor([max(1, round(seconds / max(1e-4, timed(step, 3))))])
    dist.broadcast(said, 0)
    return int(said)


def told(console: Console, name: str, found: Sequence[Found]) -> bool:
    """Print it; whether the losses are those of one device. Of every turn the slowest rank counts."""
    ours, theirs, again = (
        [max(turn) for turn in zip(*times, strict=True)]
        for times in ([f.ours for f in found], [f.theirs for f in found], [f.again for f in found])
    )
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    noise = median(a / b for a, b in zip(ours, again, strict=True))
    counts, sent = found[0].counts, found[0].sent
    mine, other, one = found[0].losses
    console.print(
        f"{name}: {counts[0]} collectives beside {counts[1]}, {sent[0] / 2**20:.1f} MiB beside "
        f"{sent[1] / 2**20:.1f} ({sent[0] / sent[1]:.2f}), {median(ours) * 1e3:.0f} ms beside "
        f"{median(theirs) * 1e3:.0f} ({ratio:.2f}; A against A {noise:.2f}); losses {mine:.6f}, {other:.6f}, "
        f"one device {one:.6f}"
    )
    return abs(mine - one) <= 1e-3 * abs(one)
