"""Saving and loading beside torch's distributed checkpoint and beside a raw write and read, in turns.

    python -m bench checkpoint [--mib 384] [--ranks 2] [--turns 5] [--small]

All in one run, each turn in another order, ours once more for the noise (A against A). A raw write is one
file for each rank with one fsync; a raw read reads it into new memory. Files are warm: what was just written
is in the cache of the system.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright import Shard, distribute_tensor
from shardwright.checkpoint import AsyncSave, async_save, load, save
from shardwright.testing.pool import RankPool

_MIB = 1 << 20
_ROWS = 1024


@dataclass(frozen=True)
class Found:
    """Seconds per turn of each program; of a rank: bytes that a load read, bytes held, memory of a load."""

    times: dict[str, list[float]]
    read: int
    held: int
    peaks: dict[str, int]


def _model(mib: int, count: int | None) -> nn.Module:
    """A module whose parameters are cut over all ranks: matrices of 16 MiB, or `count` small vectors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    shapes = [(64,)] * count if count else [(_ROWS, 4096)] * (mib // 16)
    model = nn.Module()
    for number, shape in enumerate(shapes):
        whole = torch.full(shape, float(number))
        placed = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        model.register_parameter(f"p{number}", nn.Parameter(placed))
    return model


def _raw_write(folder: Path, data: list[memoryview]) -> None:
    folder.mkdir(exist_ok=True)
    handle = os.open(folder / f"raw-{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for piece in data:
        at = 0
        while at < len(piece):
            at += os.write(handle, piece[at:])
    os.fsync(handle)
    os.close(handle)


def _raw_read(folder: Path, data: list[memoryview]) -> None:
    """Each rank its own file, into new memory."""
    handle = os.open(folder / f"raw-{dist.get_rank()}", os.O_RDONLY)
    new = torch.empty(sum(map(len, data)), dtype=torch.uint8).numpy().data
    at = 0
    while at < len(new):
        at += os.readv(handle, [new[at : at + (1 << 30)]])
    os.close(handle)


def on_rank(folder: Path, mib: int, count: int | None, turns: int) -> Found:
    """All programs in turns on this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = _model(mib, count)
    state = {name: one.detach() for name, one in model.named_parameters()}
    local = [one.to_local() for one in state.values()]
    data = [one.reshape(-1).view(torch.uint8).numpy().data for one in local]
    peers = {name: torch.zeros_like(one) for name, one in state.items()}
    read = 0

    def load_ours(in_place: bool = False) -> None:
        nonlocal read
        read = load(folder / "ours", model, in_place=in_place).bytes_read

    def stalled() -> None:
        under_way.append(async_save(folder / "async", model))

    under_way: list[AsyncSave] = []
    programs: dict[str, Callable[[], Any]] = {
        "raw write": lambda: _raw_write(folder / "raw", data),
        "save": lambda: save(folder / "ours", model),
        "save, again": lambda: save(folder / "again", model),
        "async_save, stall": stalled,
        "DCP save": lambda: dcp.save(state, storage_writer=_writer(folder / "dcp")),
        "raw read": lambda: _raw_read(folder / "raw", data),
        "load": load_ours,
        "load, again": load_ours,
        "load in place": lambda: load_ours(in_place=True),
        "DCP load": lambda: dcp.load(peers, checkpoint_id=folder / "dcp"),
    }
    made = {"save": "ours", "save, again": "again", "async_save, stall": "async", "DCP save": "dcp"}
    times: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for turn in range(turns + 1):
        for half in (names[:5], names[5:]):
            for place in range(len(half)):
                name = half[(turn + place) % len(half)]
                if name in made:
                    _fresh(folder / made[name])
                took = _timed(programs[name], until_all=name != "async_save, stall")
                for saving in under_way:
                    saving.wait()
                under_way.clear()
                if turn:
                    times[name].append(took)
    held = sum(len(piece) for piece in data)
    peaks = {name: _peak_of(programs[name]) for name in ("load", "load in place")}
    return Found(times, read, held, peaks)


def _writer(path: Path) -> Any:
    return dcp.FileSystemWriter(path, sync_files=True)


def _fresh(path: Path) -> Path:
    """Without what the last turn left; it is not timed."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return path


def _timed(program: Callable[[], Any], *, until_all: bool) -> float:
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    program()
    if until_all:
        dist.barrier()
    return time.perf_counter() - start


def _peak_of(program: Callable[[], Any]) -> int:
    """Bytes of resident memory beside what was there, at most."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    program()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(options: list[str] | None = None) -> int:
    """Measure and print; the exit code is 0."""
    asked = argparse.ArgumentParser(prog="python -m bench checkpoint")
    asked.add_argument("--mib", type=int, default=384)
    asked.add_argument("--ranks", type=int, default=2)
    asked.add_argument("--turns", type=int, default=5)
    asked.add_argument("--small", action="store_true", help="2,000 tensors of 64 elements instead")
    asked.add_argument("--folder", default=None, help="where to write; by default where temporary files go")
    given = asked.parse_args(options or [])
    count = 2000 if given.small else None
    with (
        tempfile.TemporaryDirectory(dir=given.folder) as folder,
        RankPool(preload=("shardwright.checkpoint",)) as pool,
    ):
        found = pool.run(given.ranks, on_rank, Path(folder), given.mib, count, given.turns, timeout=1800)
    _report(found, given.mib, count)
    return 0


def _report(found: list[Found], mib: int, count: int | None) -> None:
    times = {
        name: [max(turn) for turn in zip(*(one.times[name] for one in found), strict=True)]
        for name in found[0].times
    }
    what = f"{count} tensors" if count else f"{mib} MiB"
    print(f"{what} on {len(found)} ranks, medians of {len(times['save'])} turns")
    pairs = {
        "save": ("raw write", "DCP save", "save, again"),
        "async_save, stall": ("save",),
        "load": ("raw read", "DCP load", "load, again"),
    }
    for name, taken in times.items():
        print(f"  {name:18} {median(taken) * 1e3:9.1f} ms")
    for ours, others in pairs.items():
        ratios = {
            other: median(a / b for a, b in zip(times[ours], times[other], strict=True)) for other in others
        }
        print(f"  {ours} / " + ", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))
    in_place = median(a / b for a, b in zip(times["load in place"], times["raw read"], strict=True))
    print(f"  load in place / raw read: {in_place:.2f}")
    if count:
        each = {name: median(times[name]) / count * 1e3 for name in ("save", "load")}
        print(f"  per tensor: save {each['save']:.3f} ms, load {each['load']:.3f} ms")
    print(f"  bytes read per rank / needed: {max(one.read / one.held for one in found):.4f}")
    for name in found[0].peaks:
        most = max(one.peaks[name] for one in found)
        print(f"  memory of a {name} beside the model: {most / _MIB:.1f} MiB of {found[0].held / _MIB:.0f}")
