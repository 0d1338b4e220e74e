"""A training step of a decoder, each rank on its own rows, beside DDP and `fully_shard`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.decoder import WIDTH, decoder
from bench.turns import Found, Step, in_turns, told
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from shardwright.testing import RankPool, rank_mesh

_TOKENS, _ROWS = 128, 8
_MEMORY_STEPS = 3
Made = Callable[[DeviceMesh, Tensor], Step]


def run() -> int:
    """Print what was found; 1 if a loss is not that of one device."""
    console = Console(highlight=False, soft_wrap=True)
    bad = False
    cases = [(name, ranks) for name in OURS for ranks in (2, 4) if name != "hsdp" or ranks > 2]
    with RankPool() as pool:
        for name, ranks in cases:
            bad |= not told(console, f"{name}, {ranks} ranks", pool.run(ranks, measure, name, timeout=600))
    for name, ranks in cases:
        peaks = []
        for index in (0, 1):
            with RankPool() as pool:  # each in processes of its own
                peaks.append(max(pool.run(ranks, peak, name, index, timeout=600)))
        mine, other = peaks
        console.print(
            f"{name}, {ranks} ranks: peak memory of {mine / 2**20:.0f} MiB beside {other / 2**20:.0f} "
            f"({mine / other:.2f})"
        )
    return int(bad)


def measure(name: str) -> Found:
    """Our step beside torch's."""
    mesh, rows, x = given(name)
    return in_turns(OURS[name](mesh, rows), THEIRS[name](mesh, rows), _one_device(x))


def peak(name: str, index: int) -> int:
    """The most memory that the process held in its steps, beside what it held before the model was made."""
    mesh, rows, _ = given(name)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    step = (OURS, THEIRS)[index][name](mesh, rows)
    for _ in range(_MEMORY_STEPS):
        step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def given(name: str) -> tuple[DeviceMesh, Tensor, Tensor]:
    """The mesh, this rank's rows, all rows."""
    torch.set_num_threads(1)
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = rank_mesh((2, n // 2) if name == "hsdp" else (n,), ("outer", "dp")[-1 - (name == "hsdp") :])
    x = torch.randn(_ROWS, _TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    return mesh, x.tensor_split(n)[rank], x


def _ours(place: Callable[[nn.Module, DeviceMesh], nn.Module]) -> Made:
    def made(mesh: DeviceMesh, rows: Tensor) -> Step:
        model = place(decoder(), mesh)
        synchronizer = GradientSynchronizer(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> Tensor:
            loss = global_mean(model(rows).square().sum(), rows.numel(), mesh)
            with synchronizer.overlapped():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return made


def _theirs(place: Callable[[nn.Module, DeviceMesh], nn.Module]) -> Made:
    """Its gradients are means over the ranks, whose losses are means over as many rows."""

    def made(mesh: DeviceMesh, rows: Tensor) -> Step:
        model = place(decoder(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> Tensor:
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            return total / dist.get_world_size()

        return step

    return made


def _one_device(x: Tensor) -> Step:
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in list(model.children()):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _sharded_by_us(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in list(model.children()):
        parallelize_fsdp(block, mesh)
    return parallelize_fsdp(model, mesh)


def _hybrid(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in list(model.children()):
        parallelize_hsdp(block, mesh, "dp")
    return parallelize_hsdp(model, mesh, "dp")


OURS: dict[str, Made] = {
    "replicate": _ours(parallelize_replicate),
    "fsdp": _ours(_sharded_by_us),
    "hsdp": _ours(_hybrid),
}
THEIRS: dict[str, Made] = {
    "replicate": _theirs(lambda model, _: DistributedDataParallel(model)),
    "fsdp": _theirs(_sharded),
    "hsdp": _theirs(_sharded),
}
