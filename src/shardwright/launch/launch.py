"""Start the ranks of a run on this machine, or be one of those that torchrun started.

Ranks are forked from a process that has imported torch and run nothing: 0.1 s for four of them, where
starting Python anew takes 14 s. CUDA does not survive a fork, so its ranks are spawned.

Rejected: `torch.multiprocessing.spawn` and torchrun's agent, which notice a rank that died but not one that
is stopped, restart or end ranks without naming the first cause, and leave ranks behind when they are
killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from shardwright.errors import ConfigError, ShardwrightError, refuse_no_number
from shardwright.launch import supervise
from shardwright.launch.board import Board
from shardwright.launch.environment import given_ranks
from shardwright.launch.monitor import Monitor, RankHandle, show_cursor
from shardwright.launch.streams import lasting_streams
from shardwright.launch.verdict import FAILURE, USER_ERROR, describe

LOOPBACK = "127.0.0.1"


class LaunchSettings(Protocol):
    """What the launcher reads of a configuration."""

    @property
    def world(self) -> int | None:
        """How many ranks to start; None: one."""

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""

    @property
    def timeout(self) -> float:
        """Seconds without progress, after the first step, that end the run."""


C = TypeVar("C")
Settings = TypeVar("Settings", bound=LaunchSettings)


def go_on() -> str:
    """What to do after a failure, where the caller knows nothing better."""
    return "Start again with --resume to go on from the newest checkpoint."


def launch(config: Settings, target: Callable[[Settings], int], *, advice: Callable[[], str] = go_on) -> int:
    """Run `target(config)` on every rank and return the exit code of the run.

    Under torchrun this process is one rank and runs the target itself. Else `config.world` ranks are started
    here, forked (spawned for CUDA), with one thread each, and the usual variables (RANK, WORLD_SIZE,
    MASTER_ADDR, ...) set, so that `init_process_group` needs no arguments. Nothing is left behind when it
    returns or is killed.

    Args:
        config: what the target gets; the launcher reads `world`, `device` and `timeout` of it.
        target: a module-level function; what it returns is the exit code.
        advice: asked after a failure: how to go on.

    Returns: 0 or the target's code; 1 a rank failed or did not answer; 2 the target raised a
    `ShardwrightError`; 128 + signal after a stop (130 for Ctrl-C).
    """
    if not all(map(callable, (target, advice))) or config.device not in ("cpu", "cuda"):
        given = f"{target!r:.60}, {advice!r:.60} and {config.device!r:.60}"
        raise ConfigError(f"launch takes functions as target and advice, and 'cpu' or 'cuda'; got {given}")
    refuse_no_number("launch: world", 1 if config.world is None else config.world, ConfigError, whole=True)
    refuse_no_number("launch: timeout", config.timeout, ConfigError)
    with lasting_streams():
        if given_ranks() is not None:
            return _be_a_rank(config, target)
        return _Launch(config, target, advice).run()


@dataclass(frozen=True)
class _Seat(Generic[C]):
    """What one started rank is given. With fork it is inherited as it is, with spawn it is pickled."""

    target: Callable[[C], int]
    config: C
    rank: int
    board: Board
    reports: Connection[Any, Any]
    lifeline: Connection[Any, Any]
    launcher: int
    forget: tuple[Connection[Any, Any] | socket.socket, ...] = ()


class _Launch(Generic[Settings]):
    """One run on this machine: the store, the ranks and their monitor."""

    def __init__(
        self, config: Settings, target: Callable[[Settings], int], advice: Callable[[], str]
    ) -> None:
        self.config, self.target, self.advice = config, target, advice
        self.world = config.world or 1
        self.forks = config.device == "cpu" and "fork" in multiprocessing.get_all_start_methods()
        self.context: Any = multiprocessing.get_context("fork" if self.forks else "spawn")
        self.board = Board.shared(self.world)
        self.monitor = Monitor([], self.board, config.timeout)

    def run(self) -> int:
        listener = socket.create_server((LOOPBACK, 0), backlog=2 * self.world + 8)
        lifeline, held = self.context.Pipe(duplex=False)
        with contextlib.ExitStack() as stack:
            stack.callback(held.close)
            stack.callback(show_cursor)
            stack.callback(self.monitor.end_all)
            with _signals_blocked():
                self._start_ranks(listener, lifeline, held)
                stack.enter_context(_signals_to(self.monitor))
            store = serve_store(listener)
            verdict = self.monitor.watch()
            self.monitor.end_all()
            del store
        text = describe(verdict, self.advice())
        if text:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        return verdict.exit_code

    def _start_ranks(
        self, listener: socket.socket, lifeline: Connection[Any, Any], held: Connection[Any, Any]
    ) -> None:
        port = int(listener.getsockname()[1])
        inherited: tuple[Connection[Any, Any] | socket.socket, ...] = (listener, held) if self.forks else ()
        for rank in range(self.world):
            receiver, sender = self.context.Pipe(duplex=False)
            seat = _Seat(self.target, self.config, rank, self.board, sender, lifeline, os.getpid(), inherited)
            process = self.context.Process(target=_rank_main, args=(seat,), name=f"shardwright-rank-{rank}")
            with _environment(_rank_environment(rank, self.world, port)):
                process.start()
            sender.close()
            self.monitor.handles.append(RankHandle(rank, process, receiver))
        lifeline.close()


def serve_store(listener: socket.socket) -> dist.TCPStore:
    """The store in which the ranks meet, on a port that was open before they started (no race for it)."""
    return dist.TCPStore(
        LOOPBACK,
        int(listener.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=5),
        master_listen_fd=listener.detach(),
    )


def _rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    wanted = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher serves the store, so no rank is special
        "OMP_NUM_THREADS": "1",
    }
    interface = _loopback_interface()
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        wanted["GLOO_SOCKET_IFNAME"] = interface
    return wanted


def _loopback_interface() -> str | None:
    names = {name for _index, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


# inside a rank


def _rank_main(seat: _Seat[C]) -> None:
    """Live the whole life of a started rank, and end it without running the exit handlers of the launcher."""
    supervise.obey_launcher(seat.board)
    for thing in seat.forget:
        thing.close()
    watch = supervise.Watch(seat.board, seat.rank, seat.reports)
    supervise.guard(watch, seat.lifeline, seat.launcher)
    supervise.install(watch)
    torch.set_num_threads(1)
    with lasting_streams():  # a forked rank has them already, a spawned one not
        code = _run_target(seat.target, seat.config, watch)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_target(target: Callable[[C], int], config: C, watch: supervise.Watch) -> int:
    try:
        code = target(config)
    except ShardwrightError as error:
        watch.report(supervise.Failed(time.monotonic(), True, f"shardwright: {error}"))
        return USER_ERROR
    except BaseException:  # noqa: BLE001  the launcher prints the traceback that was the first cause
        watch.report(supervise.Failed(time.monotonic(), False, traceback.format_exc()))
        return FAILURE
    watch.report(supervise.Returned(code))
    return code


def _be_a_rank(config: Settings, target: Callable[[Settings], int]) -> int:
    """Run the target in this process, which torchrun started."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    watch = supervise.Watch(Board.private(world), rank)
    supervise.install(watch)
    supervise.obey_signals(watch.board)
    supervise.guard_alone(watch, config.timeout)
    code = target(config)
    if dist.is_initialized():  # left alive, its threads abort the process while Python shuts down
        dist.destroy_process_group()
    return code or (supervise.stop_exit_code() if supervise.stop_requested() else 0)


# the launcher's surroundings


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Hold signals back while ranks start: a rank inherits this, so none comes before it knows what to do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, supervise.STOPPING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _signals_to(monitor: Monitor) -> Iterator[None]:
    """Send Ctrl-C, SIGTERM and SIGHUP to the monitor instead of ending the launcher."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        monitor.interrupt(number)
        if monitor.interrupts == 1:
            sys.stderr.write("\nshardwright: finishing the step and saving; once more to abort\n")

    before = {number: signal.signal(number, on_signal) for number in supervise.STOPPING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
