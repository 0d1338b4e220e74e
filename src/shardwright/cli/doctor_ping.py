"""Two ranks on this machine that talk to each other: the same start as a run, and how fast they are."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.context.process import ProcessWorld
from shardwright.launch.launch import launch

_SMALL_ROUNDS = 200
_LARGE_BYTES = 16 << 20
_LARGE_ROUNDS = 4
_VARIABLES = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class PingSettings:
    """Where the first rank leaves its result, and when the start began."""

    result: Path
    began: float
    world: int = 2
    device: str = "cpu"
    timeout: float = 10.0


@dataclass(frozen=True)
class Ping:
    """Seconds until two ranks had met, seconds of one small message, bytes per second of large ones."""

    start: float
    latency: float
    bytes_per_second: float


def check_ping() -> Ping | str:
    """The measurement, or how it failed. Starts and ends two processes."""
    outside = {name: os.environ.pop(name) for name in _VARIABLES if name in os.environ}
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = PingSettings(Path(folder) / "ping.json", time.monotonic())
            code = launch(settings, ping_rank, advice=str)
            if code:
                return f"failed with exit code {code}"
            return Ping(**json.loads(settings.result.read_text(encoding="utf-8")))
    finally:
        os.environ.update(outside)


def ping_rank(settings: PingSettings) -> int:
    """What each of the two ranks does."""
    ProcessWorld.attach("cpu", None)
    dist.barrier()
    start = time.monotonic() - settings.began
    latency = _one_way(torch.zeros(1), _SMALL_ROUNDS)
    seconds = _one_way(torch.zeros(_LARGE_BYTES, dtype=torch.uint8), _LARGE_ROUNDS)
    if dist.get_rank() == 0:
        found = Ping(start, latency, _LARGE_BYTES / seconds)
        settings.result.write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _one_way(message: torch.Tensor, rounds: int) -> float:
    """Seconds of one message from one rank to the other."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(rounds):
        if dist.get_rank() == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
    return (time.perf_counter() - began) / (2 * rounds)
