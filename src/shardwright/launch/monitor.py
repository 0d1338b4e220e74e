"""The launcher's watch over its ranks: waits for them, names what failed first, ends what is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardwright.launch.board import Board
from shardwright.launch.supervise import Failed, Returned, StackShown
from shardwright.launch.verdict import Cause, Verdict, first_cause

POLL_SECONDS = 0.1
SETTLE_SECONDS = 1.0  # peers of a dead rank fail in a cascade: wait for its end before naming the first cause
STACK_SECONDS = 1.0
PAUSE_SECONDS = 5.0  # a longer gap between two looks: the launcher itself was stopped, so no rank is to blame
REAP_SECONDS = 5.0
START_SECONDS = 120.0  # a spawned rank imports torch before it can tick


@dataclass
class RankHandle:
    """What the launcher knows of one rank."""

    rank: int
    process: BaseProcess
    reports: Connection[Any, Any]
    returned: Returned | None = None
    failed: Failed | None = None
    stack: tuple[str, ...] = ()
    open: bool = True

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.exitcode is not None

    def cause(self) -> Cause | None:
        """Why this rank failed, None if it did not (or has not ended)."""
        code = self.process.exitcode
        self.drain()  # after the exit code is known: what the rank said last has arrived
        if self.failed is not None:
            return Cause(self.rank, self.process.pid, raised=self.failed)
        if code is None or (self.returned is not None and code == self.returned.code):
            return None
        return Cause(self.rank, self.process.pid, exitcode=code)

    def drain(self) -> None:
        """Read every report that has arrived."""
        while self.open:
            try:
                if not self.reports.poll():
                    return
                self._note(self.reports.recv())
            except (EOFError, OSError):
                self.open = False

    def _note(self, message: object) -> None:
        if isinstance(message, Returned):
            self.returned = message
        elif isinstance(message, Failed):
            self.failed = message
        elif isinstance(message, StackShown):
            self.stack = message.frames


@dataclass
class _Progress:
    """When each counter of the board was last seen to change."""

    board: Board
    start: float
    values: dict[tuple[str, int], int] = field(default_factory=dict)
    changed: dict[tuple[str, int], float] = field(default_factory=dict)

    def look(self, now: float) -> None:
        for rank in range(self.board.world):
            self._look_at(("beat", rank), self.board.beats(rank), now)
            self._look_at(("tick", rank), self.board.ticks(rank), now)

    def _look_at(self, key: tuple[str, int], value: int, now: float) -> None:
        if self.values.get(key, 0) != value:
            self.values[key], self.changed[key] = value, now

    def forgive(self, now: float) -> None:
        """Start all clocks again: the time that passed says nothing about the ranks."""
        self.start, self.changed = now, dict.fromkeys(self.changed, now)

    def silent_for(self, kind: str, rank: int, now: float) -> float:
        """Seconds since the counter last changed, or since the start."""
        return now - self.changed.get((kind, rank), self.start)


class Monitor:
    """One run, from the start of its ranks to the verdict. Ends only the processes that it was given."""

    def __init__(self, handles: Sequence[RankHandle], board: Board, timeout: float) -> None:
        self.handles = list(handles)
        self.board = board
        self.timeout = timeout
        self.interrupts = 0
        self._last_look = time.monotonic()
        self._progress = _Progress(board, self._last_look)

    def interrupt(self, signal_number: int) -> None:
        """A signal to the launcher: the first asks the ranks to finish their step, the second ends them."""
        self.interrupts += 1
        if self.interrupts == 1:
            self.board.ask_to_stop(signal_number)

    def watch(self) -> Verdict:
        """Wait until every rank has ended, one fails or hangs, or a second signal comes."""
        while not all(one.ended for one in self.handles):
            self._wait(POLL_SECONDS)
            if self.interrupts > 1:
                return Verdict(aborted=True)
            if self._causes():
                return self._name_first_cause()
            silent = self._silent()
            if silent:
                return self._name_silent(silent)
        return self._name_first_cause() if self._causes() else self._returned()

    def end_all(self) -> None:
        """Kill what still runs and wait until nothing is left."""
        for one in self.handles:
            if not one.ended:
                one.process.kill()
        deadline = time.monotonic() + REAP_SECONDS
        for one in self.handles:
            one.process.join(max(0.0, deadline - time.monotonic()))

    def _wait(self, seconds: float) -> None:
        alive = [one.process.sentinel for one in self.handles if not one.ended]
        talking = [one.reports for one in self.handles if one.open]
        wait([*alive, *talking], seconds)
        for one in self.handles:
            one.drain()

    def _returned(self) -> Verdict:
        codes = [one.returned.code for one in self.handles if one.returned is not None]
        return Verdict(code=next((code for code in codes if code), 0), stop_signal=self.board.stop_signal)

    def _name_first_cause(self) -> Verdict:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self._is_settled() and time.monotonic() < deadline:
            self._wait(POLL_SECONDS)
        return Verdict(cause=first_cause(self._causes()), step=self._last_step())

    def _is_settled(self) -> bool:
        """Whether nothing that is still to come could be the first cause: a signal is, or all have ended."""
        return any(one.by_signal for one in self._causes()) or all(one.ended for one in self.handles)

    def _causes(self) -> list[Cause]:
        return [cause for one in self.handles if (cause := one.cause()) is not None]

    def _last_step(self) -> int | None:
        steps = [self.board.step(r) for r in range(self.board.world) if self.board.beats(r)]
        return max(steps, default=None)

    # a rank that does not answer

    def _silent(self) -> list[RankHandle]:
        """Ranks that are stopped or hang, empty while the run is well."""
        now = time.monotonic()
        paused, self._last_look = now - self._last_look > PAUSE_SECONDS, now
        self._progress.look(now)
        if paused:
            self._progress.forgive(now)
        busy = [one for one in self.handles if not one.ended and one.returned is None]
        early = max(self.timeout, START_SECONDS)
        allowed = {one.rank: self.timeout if self.board.ticks(one.rank) else early for one in busy}
        dead = [one for one in busy if self._progress.silent_for("tick", one.rank, now) > allowed[one.rank]]
        return dead or self._without_progress(busy, now)

    def _without_progress(self, busy: list[RankHandle], now: float) -> list[RankHandle]:
        if not busy or not all(self.board.beats(one.rank) for one in self.handles):
            return []  # the clock starts with the first step of the last rank
        if any(self.board.is_patient(one.rank) for one in busy):
            return []
        quiet = min(self._progress.silent_for("beat", one.rank, now) for one in busy)
        return self._suspects(busy) if quiet > self.timeout else []

    def _suspects(self, busy: list[RankHandle]) -> list[RankHandle]:
        """Those that the others wait for: stopped by a signal, else not inside a collective, else all."""
        stopped = [one for one in busy if is_stopped(one.process.pid)]
        if stopped:
            return stopped
        self._collect_stacks(busy)
        return [one for one in busy if not _waits_for_peers(one.stack)] or busy

    def _collect_stacks(self, busy: list[RankHandle]) -> None:
        self.board.ask_for_stacks()
        deadline = time.monotonic() + STACK_SECONDS
        while time.monotonic() < deadline and not all(one.stack or one.ended for one in busy):
            self._wait(POLL_SECONDS)

    def _name_silent(self, silent: list[RankHandle]) -> Verdict:
        causes = [
            Cause(
                one.rank,
                one.process.pid,
                silent_for=self.timeout,
                stopped=is_stopped(one.process.pid),
                place=one.stack[-1] if one.stack else None,
            )
            for one in silent
        ]
        return Verdict(cause=causes[0], also=tuple(causes[1:]), step=self._last_step())


def is_stopped(pid: int | None) -> bool:
    """Whether a signal (SIGSTOP, Ctrl-Z) or a debugger has stopped the process, where /proc tells it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in {"T", "t"}


def _waits_for_peers(stack: tuple[str, ...]) -> bool:
    """Whether a rank that shows this stack is inside a collective (a rank that shows none is not)."""
    inside = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}shardwright{os.sep}comm{os.sep}")
    return any(place in frame for frame in stack[-6:] for place in inside)


def show_cursor() -> None:
    """A rank that was killed while it drew its progress has left the cursor hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()
