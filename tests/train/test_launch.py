"""The launcher with real processes and signals: whatever happens, the run ends, says why, leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from shardwright.errors import ConfigError
from shardwright.launch import supervise
from shardwright.launch.board import Board
from shardwright.launch.launch import launch
from tests.tiers import only

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).with_name("launch_program.py")
SOURCE = Path(__file__).parents[2] / "src"


class Run:
    """A launcher in a session of its own, as a terminal would start it."""

    def __init__(self, pid: int, folder: Path, world: int) -> None:
        self.pid, self.folder, self.world = pid, folder, world
        self.errors = folder / f"errors-{pid}"

    def ranks(self) -> list[int]:
        """Process ids of the ranks, once each has finished its first step."""
        return [int(self._wait_for(f"rank-{rank}.pid").read_text()) for rank in range(self.world)]

    def steps_at_end(self) -> list[int]:
        return [int(self._wait_for(f"rank-{rank}.end").read_text()) for rank in range(self.world)]

    def end(self, within: float = 40) -> tuple[int, str]:
        wait_until(self.has_ended, within)
        return int((self.folder / f"exit-{self.pid}").read_text()), self.errors.read_text()

    def has_ended(self) -> bool:
        return (self.folder / f"exit-{self.pid}").exists()

    def left(self) -> list[int]:
        """Processes of this run that still exist; waits a moment for the kernel to reap them."""
        wait_until(lambda: not self._alive(), 4, fail=False)
        return self._alive()

    def clean_up(self) -> None:
        for pid in self._alive():
            os.kill(pid, signal.SIGKILL)

    def _alive(self) -> list[int]:
        return [one.pid for one in psutil.process_iter() if self._is_mine(one)]

    def _is_mine(self, one: psutil.Process) -> bool:
        try:
            return os.getsid(one.pid) == self.pid and one.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ProcessLookupError):
            return False

    def _wait_for(self, name: str) -> Path:
        path = self.folder / name
        wait_until(lambda: path.exists() or self.has_ended(), 60)
        assert path.exists(), self.errors.read_text()
        return path


def wait_until(condition: Callable[[], object], seconds: float, fail: bool = True) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition() or not fail


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    """The program that starts launchers; it has imported torch, so that each test need not."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process


@pytest.fixture
def start(program: subprocess.Popen[str], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(environment: dict[str, str] | None = None, **settings: Any) -> Run:
        assert program.stdin is not None
        assert program.stdout is not None
        order = {"folder": str(tmp_path), "environment": environment or {}, "settings": settings}
        program.stdin.write(json.dumps(order) + "\n")
        program.stdin.flush()
        runs.append(Run(int(program.stdout.readline()), tmp_path, settings.get("world", 3)))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


def test_every_rank_gets_its_number_and_one_thread(start: Callable[..., Run]) -> None:
    run = start(steps=3, behave="report")
    assert run.end()[0] == 0
    facts = [json.loads((run.folder / f"rank-{r}.facts").read_text()) for r in range(3)]
    assert facts == [{"rank": str(r), "world": 3, "threads": 1} for r in range(3)]
    assert run.errors.read_text() == ""


def test_the_code_that_the_target_returns_is_the_exit_code(start: Callable[..., Run]) -> None:
    assert start(steps=2, world=1, behave="return 7").end() == (7, "")


def test_cuda_ranks_are_spawned(start: Callable[..., Run]) -> None:
    assert start(steps=2, world=1, device="cuda", behave="return 7").end(60) == (7, "")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_run_and_is_named(start: Callable[..., Run], victim: int) -> None:
    run = start()
    os.kill(run.ranks()[victim], signal.SIGKILL)
    code, text = run.end(within=5)
    assert code == 1
    assert f"rank {victim} (process {run.ranks()[victim]}) was killed by SIGKILL" in text
    assert "--resume" in text
    assert "Traceback" not in text
    assert run.left() == []


def test_a_killed_launcher_leaves_no_process(start: Callable[..., Run]) -> None:
    """Also not a rank that is stopped and so cannot see that its launcher is gone."""
    run = start()
    os.kill(run.ranks()[1], signal.SIGSTOP)
    os.kill(run.pid, signal.SIGKILL)
    assert run.left() == []


def test_a_launcher_that_is_killed_while_the_ranks_start_leaves_no_process(start: Callable[..., Run]) -> None:
    run = start(behave="hang before the first step")
    run.ranks()
    os.kill(run.pid, signal.SIGKILL)
    assert run.left() == []


@pytest.mark.parametrize("behave", only(["well"], ["well", "hang before the first step"]))
def test_a_stopped_rank_ends_the_run_after_the_timeout_and_is_named(
    start: Callable[..., Run], behave: str
) -> None:
    run = start(timeout=3.0, behave=behave)
    victim = run.ranks()[1]
    os.kill(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    code, text = run.end(within=12)
    assert time.monotonic() - stopped > 2.5
    assert code == 1
    assert f"rank 1 (process {victim}) is stopped (SIGSTOP" in text
    assert "rank 0 (process" not in text
    assert run.left() == []


def test_a_rank_that_hangs_is_named_with_the_place(start: Callable[..., Run]) -> None:
    run = start(timeout=3.0, behave="sleep")
    run.ranks()
    code, text = run.end(within=12)
    assert code == 1
    assert "rank 1 (process" in text
    assert "launch_program.py" in text
    assert "a_place_to_hang" in text
    assert "rank 0 (process" not in text


def test_a_long_operation_may_take_longer_than_the_timeout(start: Callable[..., Run]) -> None:
    assert start(timeout=1.5, steps=8, behave="long operation").end() == (0, "")


@pytest.mark.parametrize("whole_group", [True, False])
def test_the_first_interrupt_ends_all_ranks_after_the_same_step(
    start: Callable[..., Run], whole_group: bool
) -> None:
    run = start()
    run.ranks()
    (os.killpg if whole_group else os.kill)(run.pid, signal.SIGINT)
    code, text = run.end(within=10)
    assert code == 130
    assert len(set(run.steps_at_end())) == 1
    assert "once more to abort" in text
    assert "Traceback" not in text
    assert run.left() == []


def test_the_second_interrupt_aborts_at_once(start: Callable[..., Run]) -> None:
    run = start(behave="save slowly")
    run.ranks()
    os.killpg(run.pid, signal.SIGINT)
    wait_until(lambda: "once more" in run.errors.read_text(), 5)
    os.killpg(run.pid, signal.SIGINT)
    code, text = run.end(within=5)
    assert code == 130
    assert "aborted" in text
    assert run.left() == []


def test_a_termination_signal_to_the_group_saves_and_exits_143(start: Callable[..., Run]) -> None:
    run = start()
    run.ranks()
    os.killpg(run.pid, signal.SIGTERM)
    assert run.end(within=10)[0] == 143
    assert len(set(run.steps_at_end())) == 1


def test_an_exception_shows_the_traceback_of_the_rank_that_failed_first(start: Callable[..., Run]) -> None:
    code, text = start(behave="raise").end()
    assert code == 1
    assert text.count("Traceback (most recent call last)") == 1
    assert "rank 1 (process" in text
    assert "failed: ZeroDivisionError: on purpose" in text


def test_a_user_error_is_one_line_and_exit_code_2(start: Callable[..., Run]) -> None:
    assert start(behave="user error").end() == (2, "shardwright: the checkpoint is of another model\n")


class TestUnderTorchrun:
    """Ranks that somebody else started: each process is one rank and guards itself."""

    @pytest.fixture
    def ranks(self, start: Callable[..., Run]) -> Callable[..., list[Run]]:
        def begin(**settings: Any) -> list[Run]:
            shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            runs = [
                start(environment={**shared, "RANK": str(r), "OMP_NUM_THREADS": "1"}, world=2, **settings)
                for r in range(2)
            ]
            assert runs[0].ranks() == [one.pid for one in runs]
            return runs

        return begin

    def test_it_runs_the_target_in_the_given_process_and_obeys_one_interrupt(
        self, ranks: Callable[..., list[Run]]
    ) -> None:
        runs = ranks()
        os.kill(runs[1].pid, signal.SIGINT)
        assert [one.end(10)[0] for one in runs] == [130, 130]
        assert len(set(runs[0].steps_at_end())) == 1

    def test_a_stopped_peer_ends_every_rank_after_the_timeout(self, ranks: Callable[..., list[Run]]) -> None:
        runs = ranks(timeout=1.5)
        os.kill(runs[1].pid, signal.SIGSTOP)
        code, text = runs[0].end(within=8)
        assert code == 1
        assert "has finished no step for 1.5 s" in text


def test_ranks_whose_torchrun_was_killed_are_asked_to_save_and_end(monkeypatch):
    parents, ticks = iter([7, 7, 1]), iter([None] * 3)
    monkeypatch.setattr(supervise.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(supervise.time, "sleep", lambda _: next(ticks))
    watch = supervise.Watch(Board.private())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with pytest.raises(StopIteration):
        supervise._end_when_stuck(watch, 30.0, None)
    assert watch.board.stop_signal == signal.SIGTERM


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    "given",
    [{"world": "x"}, {"world": 0}, {"world": 1.5}, {"device": "gpu"}, {"timeout": None}, {"timeout": 0}],
)
def test_what_no_run_has_is_refused_before_anything_is_started(given):
    config = SimpleNamespace(**{"world": 1, "device": "cpu", "timeout": 5.0, **given})
    with pytest.raises(ConfigError, match=r"is no (whole )?number above 0|takes functions as target"):
        launch(config, abs)
    with pytest.raises(ConfigError, match="takes functions as target"):
        launch(config, 3)
