"""A whole training step of an unmodified decoder under tensor parallelism, beside torch's styles."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwright as sw
from bench.decoder import WIDTH, decoder
from bench.turns import Found, Step, in_turns, told
from shardwright.testing import RankPool, rank_mesh

_TOKENS, _ROWS = 128, 8
_COLUMNS = ("q", "k", "v", "gate", "up")
_PLACES = dict.fromkeys(("q", "k", "v", "o"), "attention") | dict.fromkeys(("gate", "up", "down"), "mlp")


def run() -> int:
    """Print what was found; 1 if losses differ, or there are more collectives than with torch's styles."""
    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    with RankPool() as pool:
        for ranks in (2, 4):
            found = pool.run(ranks, measure, timeout=600)
            mine, other = found[0].counts
            bad |= not told(console, f"{ranks} ranks", found) or mine > other
    return int(bad)


def measure() -> Found:
    """Our step beside torch's."""
    torch.set_num_threads(1)
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    x = torch.randn(_ROWS, _TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    ours = sw.distribute_module(
        decoder(),
        mesh,
        {f"*.{name}.weight": {"tp": sw.Shard(0)} for name in _COLUMNS}
        | {f"*.{name}.weight": {"tp": sw.Shard(1)} for name in ("o", "down")},
    )
    theirs = _in_styles(decoder(), mesh)
    return in_turns(_step(ours, x, mesh), _step(theirs, x), _step(decoder(), x))


def _step(model: nn.Module, x: Tensor, mesh: object = None) -> Step:
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
