"""What a rank does so that it can be supervised: beats, obeys a stop, and never outlives its launcher.

The loop calls `heartbeat(step)` after each step, asks `stop_requested()`, and wraps what may take longer than
the timeout (a checkpoint, an evaluation, a reference run) in `long_operation()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from shardwright.launch.board import FINISH_STEP, Board

TICK_SECONDS = 0.2
_SAME_KEYPRESS_SECONDS = 0.5  # torchrun passes on a signal that the terminal has also sent to the rank
_ABORTED = 128 + signal.SIGINT
_PR_SET_PDEATHSIG = 1
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Returned:
    """A rank's target ended normally with this exit code."""

    code: int


@dataclass(frozen=True)
class Failed:
    """A rank's target raised; `user_error` when the message is all that a person needs."""

    when: float
    user_error: bool
    text: str


@dataclass(frozen=True)
class StackShown:
    """Where the main thread of a rank was, innermost frame last."""

    frames: tuple[str, ...]


@dataclass(frozen=True)
class Watch:
    """One rank's end of the supervision. Not a process group: it works when no collective does."""

    board: Board
    rank: int = 0
    reports: Connection[Any, Any] | None = None

    def report(self, message: Returned | Failed | StackShown) -> None:
        """Tell the launcher. A launcher that is gone is no error here: `guard` ends this process."""
        if self.reports is not None:
            with contextlib.suppress(OSError):
                self.reports.send(message)


_watch: ContextVar[Watch | None] = ContextVar("shardwright_watch", default=None)


def install(watch: Watch) -> None:
    """Make `watch` the one that the functions of this module use in this thread, the one of the loop."""
    _watch.set(watch)


def stop_requested() -> bool:
    """Whether this rank was asked to finish its step, save and end (first Ctrl-C, SIGTERM).

    Ranks may learn it one step apart: decide together, in a reduction.
    """
    watch = _watch.get()
    return watch is not None and watch.board.stop_level >= FINISH_STEP


def stop_exit_code() -> int:
    """The exit code of a run that was asked to stop: 128 + the signal (130 for Ctrl-C)."""
    watch = _watch.get()
    return 128 + ((watch.board.stop_signal if watch else 0) or signal.SIGINT)


def heartbeat(step: int) -> None:
    """Say that this rank has finished `step`. Cost: two writes to shared memory, no system call."""
    watch = _watch.get()
    if watch is not None:
        watch.board.beat(watch.rank, step)


@contextlib.contextmanager
def long_operation() -> Iterator[None]:
    """Mark work that may take longer than the timeout without finishing a step.

    Meanwhile only a rank that is stopped or dead ends the run.
    """
    watch = _watch.get()
    if watch is None:
        yield
        return
    watch.board.be_patient(watch.rank, +1)
    try:
        yield
    finally:
        watch.board.be_patient(watch.rank, -1)
        watch.board.beat(watch.rank, watch.board.step(watch.rank))


# signals


def obey_launcher(board: Board) -> None:
    """Ignore Ctrl-C and a closed terminal, which reach every process of it: the launcher obeys them.

    SIGTERM to one rank (or to the whole group, as cluster schedulers send it) asks the run to stop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _frame: board.ask_to_stop(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING_SIGNALS)


def obey_signals(board: Board) -> None:
    """Without a launcher: the first SIGINT or SIGTERM asks for a stop, the second ends this rank at once."""
    asked_at: list[float] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if asked_at and now - asked_at[0] > _SAME_KEYPRESS_SECONDS:
            os._exit(128 + number)
        asked_at.append(now)
        board.ask_to_stop(number)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


# the thread that watches


def guard(watch: Watch, lifeline: Connection[Any, Any], launcher: int) -> None:
    """Start the thread that ticks, shows this rank's stack on demand, and ends the process with its launcher.

    Args: lifeline: read end of a pipe whose only write end the launcher holds. launcher: its process id.
    """
    die_with_parent()
    main = threading.main_thread().ident
    threading.Thread(
        target=_stand_guard, args=(watch, lifeline, launcher, main), name="shardwright-guard", daemon=True
    ).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even while this process is stopped (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stand_guard(watch: Watch, lifeline: Connection[Any, Any], launcher: int, main: int | None) -> None:
    watch.board.tick(watch.rank)
    shown = False
    while os.getppid() == launcher and not wait([lifeline], TICK_SECONDS):
        watch.board.tick(watch.rank)
        if watch.board.stacks_wanted and not shown:
            shown = True
            watch.report(StackShown(stack_of(main)))
    os._exit(_ABORTED)


def stack_of(thread: int | None) -> tuple[str, ...]:
    """The frames of a thread as `file:line function`, innermost last."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return ()
    return tuple(f"{one.filename}:{one.lineno} {one.name}" for one in traceback.extract_stack(frame))


def guard_alone(watch: Watch, timeout: float) -> None:
    """Without a launcher (torchrun): end this process when, after its first step, none follows in `timeout`.

    A peer that is stopped ends the run on every rank in this way. Ranks whose torchrun was killed are
    asked to finish their step, save and end.
    """
    main = threading.main_thread().ident
    threading.Thread(
        target=_end_when_stuck, args=(watch, timeout, main), name="shardwright-guard", daemon=True
    ).start()


def _end_when_stuck(watch: Watch, timeout: float, main: int | None) -> None:
    board, rank = watch.board, watch.rank
    beats, since = board.beats(rank), time.monotonic()
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    while True:
        time.sleep(TICK_SECONDS)
        if agent is not None and os.getppid() != agent:
            agent = None
            board.ask_to_stop(signal.SIGTERM)
        now = time.monotonic()
        if board.beats(rank) != beats or beats == 0 or board.is_patient(rank):
            beats, since = board.beats(rank), now
        elif now - since > timeout:
            sys.stderr.write(_stuck_text(watch, timeout, main))
            sys.stderr.flush()
            os._exit(1)


def _stuck_text(watch: Watch, timeout: float, main: int | None) -> str:
    return (
        f"shardwright: rank {watch.rank} has finished no step for {timeout:g} s (last: step "
        f"{watch.board.step(watch.rank)}): it, or a rank that it waits for, does not answer. It was at "
        f"{(stack_of(main) or ('an unknown place',))[-1]}. Start again with --resume, or allow more with "
        "--timeout.\n"
    )
