"""Real ranks that are killed with SIGKILL at random moments of a save, one of them or all."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import latest, load, save, step_path
from shardwright.errors import CheckpointError

_RANKS = 2


def _model(value: float) -> nn.Module:
    model = nn.Module()
    for number in range(12):
        model.register_parameter(f"p{number}", nn.Parameter(torch.full((300, 100), value)))
    return model


def _save_for_ever(out: Path, store: Path, rank: int) -> None:
    """Save to two steps in turn, each time over the older one, until killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_RANKS)
    number = 0
    while True:
        number += 1
        save(step_path(out, 1 + number % 2), _model(float(number)), extra=number, step=number)


def random_moments(folder: Path, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Kill at random moments; then what is committed is one save, whole, and this process saves again.

    Forked, so this process must have no threads.
    """
    at = random.Random(seed)
    for number in range(count):
        out = folder / f"r{number}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        victims = (0,), (1,), (0, 1)
        chosen = victims[number % 3]
        delay = at.uniform(0.02, 0.5)
        _killed(out, delay, chosen)
        yield f"ranks {chosen} after {delay:.3f} s", _verdict(out)
        shutil.rmtree(out)


def _killed(out: Path, delay: float, victims: tuple[int, ...]) -> None:
    pids = [_fork(out, rank) for rank in range(_RANKS)]
    deadline = time.monotonic() + 60
    while not list(out.glob("checkpoints/*/data-*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    time.sleep(0.05)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(out: Path, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        _save_for_ever(out, out / "store", rank)
    finally:
        os._exit(1)


def _verdict(out: Path) -> str:
    for step in (1, 2):
        path = step_path(out, step)
        if (path / "manifest.json").exists():
            why = _whole(path)
            if why:
                return why
    try:
        newest = latest(out)
    except CheckpointError as error:
        return "" if not list(out.glob("checkpoints/*/manifest.json")) else str(error)
    save(newest, _model(-7.0), extra=-7)
    names = {one.name.split("-")[0] for one in newest.iterdir()}
    return _whole(newest) or ("" if names == {"data", "manifest.json"} else f"left behind: {sorted(names)}")


def _whole(path: Path) -> str:
    """Every tensor has the value of one save."""
    model = _model(0.0)
    try:
        extra = load(path, model).extra
    except CheckpointError as error:
        return str(error)
    values = {value for one in model.parameters() for value in one.flatten().tolist()}
    return "" if values == {float(extra)} else f"{path} mixes saves: {values}"
