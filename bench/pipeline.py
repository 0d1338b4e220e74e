"""A pipeline's step beside torch's own, over plain modules that were cut by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed import pipelining

from bench.decoder import WIDTH, decoder
from bench.turns import Found, Step, in_turns, told
from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.testing import RankPool, rank_mesh

_RANKS, _MICRO, _ROWS = 2, 8, 16
_LENGTHS = (128,)
_SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, 2),
    "1f1b": (pipelining.Schedule1F1B, 2),
    "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, 4),
}


def run() -> int:
    """Print what was found; 1 if a loss is not that of one device."""
    console, bad = Console(highlight=False, soft_wrap=True), False
    with RankPool() as pool:
        for length in _LENGTHS:
            for name in _SCHEDULES:
                found = pool.run(_RANKS, beside_torch, name, length, timeout=600)
                title = f"{name} of {_ROWS} x {length} tokens in {_MICRO} micro-batches, {_RANKS} ranks"
                bad |= not told(console, title, found[::-1])  # the last rank has torch's loss
    return int(bad)


def _inputs(length: int) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(1)
    return torch.randn(_ROWS, length, WIDTH, generator=made), torch.randn(
        _ROWS, length, WIDTH, generator=made
    )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / (_ROWS * WIDTH)


def _bounds(stages: int, parts: int) -> list[int]:
    return [parts * stage // stages for stage in range(stages + 1)]


def _ours(name: str, length: int) -> Step:
    x, target = _inputs(length)
    model = decoder()
    bounds = _bounds(_SCHEDULES[name][1], len(list(model.children())))
    parallelize_pipeline(model, rank_mesh((_RANKS,), ("pp",)), [str(b) for b in bounds[1:-1]])
    pipeline = Pipeline(model, _loss, micro_batches=_MICRO, schedule=name)

    def step() -> Tensor:
        loss = pipeline.step(x, target=target)
        model.zero_grad()
        return loss

    return step


def _theirs(name: str, length: int) -> Step:
    x, target = _inputs(length)
    kind, count = _SCHEDULES[name]
    parts = list(decoder().children())
    bounds = _bounds(count, len(parts))
    mesh, cpu = rank_mesh((_RANKS,), ("pp",)), torch.device("cpu")
    modules = {
        s: nn.Sequential(*parts[bounds[s] : bounds[s + 1]]) for s in range(dist.get_rank(), count, _RANKS)
    }
    stages = [
        pipelining.PipelineStage(module, s, count, cpu, group=mesh.get_group())
        for s, module in modules.items()
    ]
    made = stages if count > _RANKS else stages[0]
    schedule = kind(made, _MICRO, loss_fn=_loss, scale_grads=False)

    def step() -> Tensor:
        losses: list[Tensor] = []
        given = (x,) if 0 in modules else ()
        schedule.step(*given, target=target, losses=losses, return_outputs=False)
        for module in modules.values():
            module.zero_grad()
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())

    return step


def beside_torch(name: str, length: int) -> Found:
    """Our step, torch's, one device."""
    x, target = _inputs(length)
    alone = decoder()
    return in_turns(_ours(name, length), _theirs(name, length), lambda: _loss(alone(x), target).detach())
