"""Saving and loading beside torch's distributed checkpoint and beside a raw write and read, in turns.

    python -m bench checkpoint [--mib 384 2048] [--ranks 2 4] [--turns 5] [--small]

All in one run, each turn in another order, ours once more for the noise (A against A). A raw write is one
file for each rank with one fsync; a raw read reads it into new memory. Files are warm: what was just written
is in the cache of the system. Beside the time stands the processor time of all ranks, which a machine that
others use disturbs less. Where a virtual machine first touches its memory the host must find it, which is
timed as ours: `--touch 12` does that before (in GiB). The ratio of a line is the median over turns; the goal
stands behind it.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bench.checkpoint_report import report
from shardwright import Shard, distribute_tensor
from shardwright.checkpoint import AsyncSave, async_save, load, save
from shardwright.testing.pool import RankPool

_MIB = 1 << 20
_ROWS = 1024
_ALONE = "steps alone"


@dataclass(frozen=True)
class Found:
    """What one rank has found.

    Args: times: seconds per turn of each program. work: those of the processor. read, held: bytes that a load
        read, and that the rank holds. peaks: memory of a load.
    """

    times: dict[str, list[float]]
    work: dict[str, list[float]]
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

    def with_steps() -> None:
        """A run that saves in the background: its steps, until the checkpoint is committed."""
        stalled()
        while not under_way[0].done:
            _step(work)
            steps[0] += 1

    work, steps = torch.randn(256, 256), [0]
    under_way: list[AsyncSave] = []
    programs: dict[str, Callable[[], Any]] = {
        "raw write": lambda: _raw_write(folder / "raw", data),
        "save": lambda: save(folder / "ours", model),
        "save, again": lambda: save(folder / "again", model),
        "async_save, stall": stalled,
        "async_save, steps": with_steps,
        "DCP save": lambda: dcp.save(state, storage_writer=_writer(folder / "dcp")),
        "raw read": lambda: _raw_read(folder / "raw", data),
        "load": load_ours,
        "load, again": load_ours,
        "load in place": lambda: load_ours(in_place=True),
        "DCP load": lambda: dcp.load(peers, checkpoint_id=folder / "dcp"),
    }
    made = {"save": "ours", "save, again": "again", "DCP save": "dcp"}
    made |= {"async_save, stall": "async", "async_save, steps": "async"}

    def one(name: str) -> dict[str, tuple[float, float]]:
        """Seconds of one program; of the steps of a run that saves also without the save."""
        if name in made:
            _fresh(folder / made[name])
        steps[0] = 0
        took = {name: _timed(programs[name], until_all=not name.startswith("async"))}
        for saving in under_way:
            saving.wait()
        under_way.clear()
        if name == "async_save, steps":
            took[_ALONE] = _timed(lambda: [_step(work) for _ in range(steps[0])], until_all=False)
        return took

    times, works = _in_turns(one, list(programs), turns)
    peaks = {name: _peak_of(programs[name]) for name in ("load", "load in place")}
    return Found(times, works, read, sum(map(len, data)), peaks)


def _in_turns(
    one: Callable[[str], dict[str, tuple[float, float]]], names: list[str], turns: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds, and those of the processor: savers, then readers, each half beginning elsewhere each turn."""
    times: dict[str, list[float]] = {name: [] for name in (*names, _ALONE)}
    works: dict[str, list[float]] = {name: [] for name in times}
    cut = names.index("raw read")
    for turn in range(turns + 1):
        for half in (names[:cut], names[cut:]):
            for place in range(len(half)):
                for each, (seconds, worked) in one(half[(turn + place) % len(half)]).items():
                    times[each].append(seconds)
                    works[each].append(worked)
    for taken in (*times.values(), *works.values()):
        del taken[0]  # the first turn warms up
    return times, works


def _step(x: torch.Tensor) -> torch.Tensor:
    """Some Python and some arithmetic, as a training step has."""
    for _ in range(20):
        x = torch.tanh(x @ x)
    return x


def _writer(path: Path) -> Any:
    return dcp.FileSystemWriter(path, sync_files=True)


def _fresh(path: Path) -> Path:
    """Without what the last turn left; it is not timed."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    return path


def _timed(program: Callable[[], Any], *, until_all: bool) -> tuple[float, float]:
    """Seconds, and those of this rank's processor."""
    os.sync()
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    program()
    if until_all:
        dist.barrier()
    return time.perf_counter() - start, time.process_time() - worked


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


def _touch(nbytes: int) -> None:
    """Have the host of a virtual machine give it its memory before anything is timed."""
    if nbytes:
        with mmap.mmap(-1, nbytes) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, nbytes, 4096):
                memory[at] = 1


def run(options: list[str] | None = None) -> int:
    """Measure and print; the exit code is 0."""
    asked = argparse.ArgumentParser(prog="python -m bench checkpoint")
    asked.add_argument("--mib", type=int, nargs="+", default=[384])
    asked.add_argument("--ranks", type=int, nargs="+", default=[2])
    asked.add_argument("--turns", type=int, default=5)
    asked.add_argument("--small", action="store_true", help="2,000 tensors of 64 elements instead")
    asked.add_argument("--folder", default=None, help="where to write; by default where temporary files go")
    asked.add_argument("--touch", type=int, default=0, help="GiB of memory to touch first (see the top)")
    given = asked.parse_args(options or [])
    _touch(given.touch << 30)
    count = 2000 if given.small else None
    for mib in given.mib[:1] if count else given.mib:
        for ranks in given.ranks:
            with (
                tempfile.TemporaryDirectory(dir=given.folder) as folder,
                RankPool(preload=("shardwright.checkpoint",)) as pool,
            ):
                found = pool.run(ranks, on_rank, Path(folder), mib, count, given.turns, timeout=3600)
            report(found, mib, count)
    return 0
