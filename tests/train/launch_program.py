"""A small program for the launcher's tests: ranks that meet in an all-reduce in every step.

It imports torch once and then starts a launcher, in a session of its own, for each line that it reads:
`{"folder": ..., "environment": {...}, "settings": {...}}`. It answers with the process id, and writes
FOLDER/exit-PID when that launcher has ended. Each rank writes FOLDER/rank-R.pid after its first step (or when
it hangs before), and FOLDER/rank-R.end with the step after which it ended.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwright.errors import CheckpointError
from shardwright.launch.launch import launch
from shardwright.launch.supervise import heartbeat, long_operation, stop_exit_code, stop_requested


@dataclass(frozen=True)
class Settings:
    folder: Path
    world: int = 3
    device: str = "cpu"
    timeout: float = 30.0
    steps: int = 1_000_000
    behave: str = "well"
    culprit: int = 1


def target(settings: Settings) -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if settings.behave == "hang before the first step":
        _write(settings, rank, "pid", os.getpid())
        time.sleep(1000)
    return _loop(settings, rank)


def _loop(settings: Settings, rank: int) -> int:
    for step in range(settings.steps):
        stopping = torch.tensor(float(stop_requested()))
        dist.all_reduce(stopping)
        heartbeat(step)
        if step == 0:
            _write(settings, rank, "pid", os.getpid())
        if step == 5 and rank == settings.culprit:
            _misbehave(settings.behave)
        if settings.behave == "save slowly" and stop_requested():
            time.sleep(1000)
        if stopping:
            _write(settings, rank, "end", step)
            return stop_exit_code()
        time.sleep(0.01)
    _write(settings, rank, "end", settings.steps)
    return {"return 7": 7, "report": _report(settings, rank)}.get(settings.behave, 0)


def _misbehave(how: str) -> None:
    if how == "raise":
        raise ZeroDivisionError("on purpose")
    if how == "user error":
        raise CheckpointError("the checkpoint is of another model")
    if how == "sleep":
        a_place_to_hang()
    if how == "long operation":
        with long_operation():
            time.sleep(3)


def a_place_to_hang() -> None:
    time.sleep(1000)


def _report(settings: Settings, rank: int) -> int:
    facts = {"rank": os.environ["RANK"], "world": dist.get_world_size(), "threads": torch.get_num_threads()}
    (settings.folder / f"rank-{rank}.facts").write_text(json.dumps(facts))
    return 0


def _write(settings: Settings, rank: int, what: str, value: int) -> None:
    draft = settings.folder / f"rank-{rank}.{what}.draft"
    draft.write_text(str(value))
    draft.rename(settings.folder / f"rank-{rank}.{what}")


def serve() -> None:
    """Start launchers until the input ends."""
    folders: dict[int, Path] = {}
    while True:
        if select.select([sys.stdin], [], [], 0.01)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            order = json.loads(line)
            pid = os.fork() or _become_launcher(order)
            folders[pid] = Path(order["folder"])
            print(pid, flush=True)
        _reap(folders)


def _reap(folders: dict[int, Path]) -> None:
    while folders and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        pid, status = ended
        draft = folders[pid] / f"exit-{pid}.draft"
        draft.write_text(str(os.waitstatus_to_exitcode(status)))
        draft.rename(folders.pop(pid) / f"exit-{pid}")


def _become_launcher(order: dict[str, Any]) -> NoReturn:
    os.setsid()
    os.environ.update(order["environment"])
    folder = Path(order["folder"])
    with (folder / f"errors-{os.getpid()}").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    try:
        code = launch(Settings(folder=folder, **order["settings"]), target)
    except BaseException:  # noqa: BLE001  whatever it is, this process must not go on as its parent
        traceback.print_exc()
        code = 99
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
