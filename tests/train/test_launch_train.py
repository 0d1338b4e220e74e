"""The training command itself, killed and interrupted: it ends in time, says why, and `--resume` goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from shardwright.checkpoint import list_checkpoints, step_of
from shardwright.cli.app import main
from tests.train.worlds import write_text

pytestmark = pytest.mark.processes
SOURCE = Path(__file__).parents[2] / "src"
SMALL = ["--batch-size", "4", "--seq-len", "16", "--experts", "4", "--checkpoint-every", "2"]
SMALL += ["--layers", "2"]


def words_of(text: Path, out: Path, *words: str) -> list[str]:
    return ["train", *SMALL, "--data", str(text), "--out", str(out), *words]


class Training:
    """A run of `shardwright train` on a small model in a process group of its own."""

    def __init__(self, out: Path, *words: str) -> None:
        self.out = out
        self.text = text = out.with_suffix(".txt")  # the default is a large one, which each rank would read
        write_text(text)
        self.errors = out.with_suffix(".stderr")
        with self.errors.open("w") as errors, _without_reader() as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shardwright", *words_of(text, out, *words)],
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def wait_for_checkpoint(self) -> list[psutil.Process]:
        """The ranks, once a checkpoint is finished."""
        deadline = time.monotonic() + 90
        while not list_checkpoints(self.out).committed and self.process.poll() is None:
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.05)
        assert self.process.poll() is None, self.errors.read_text()
        return psutil.Process(self.process.pid).children()

    def end(self, within: float) -> tuple[int, str]:
        return self.process.wait(within), self.errors.read_text()

    def steps_in_metrics(self) -> list[int]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def newest(self) -> int:
        return step_of(list_checkpoints(self.out).committed[0])


def _without_reader() -> IO[bytes]:
    """The end to write to of `| tee`, which the same Ctrl-C has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb")


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def begin(*words: str) -> Training:
        started.append(Training(tmp_path / "run", *words))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()  # its ranks follow
        one.process.wait()


def test_after_a_killed_rank_another_mesh_goes_on_without_a_gap(
    train: Callable[..., Training], ranks: Callable[..., list[int]]
) -> None:
    """As under torchrun where it goes on: two processes less that import torch."""
    run = train("--world", "2", "--dp-replicate", "2", "--steps", "100000")
    two = run.wait_for_checkpoint()
    assert len(two) == 2
    two[0].kill()
    assert not psutil.wait_procs(two, timeout=5)[1]
    code, text = run.end(within=30)
    assert code == 1
    assert "rank 0 (process" in text
    assert "was killed by SIGKILL" in text
    assert f"Go on from step-{run.newest():08d}: the same command with --resume --out {run.out}." in text
    steps = run.newest() + 2
    words = words_of(run.text, run.out, "--resume", "--ep", "2", "--steps", str(steps))
    assert ranks(2, main, words, fresh=True, timeout=120) == [0, 0]
    assert run.steps_in_metrics() == list(range(1, steps + 1))
    assert run.newest() == steps


@pytest.mark.slow
def test_an_interrupt_finishes_the_step_and_saves_it(train: Callable[..., Training]) -> None:
    run = train("--world", "2", "--tp", "2", "--steps", "100000")
    run.wait_for_checkpoint()
    os.killpg(run.process.pid, signal.SIGINT)
    code, text = run.end(within=30)
    assert code == 130
    assert "Traceback" not in text
    steps = run.steps_in_metrics()
    assert steps == list(range(1, run.newest() + 1))
    assert list_checkpoints(run.out).unfinished == ()
