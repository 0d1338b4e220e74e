"""How a run ended, in words: which rank, what happened to it, and what to do."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.launch.supervise import Failed

USER_ERROR, FAILURE = 2, 1
_KILLED_BY = {
    signal.SIGKILL: "the system ran out of memory, or somebody ended it",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "a crash in native code",
    signal.SIGBUS: "a file or shared memory that was cut short",
    signal.SIGFPE: "an arithmetic fault in native code",
    signal.SIGILL: "a build of torch for another processor",
}


@dataclass(frozen=True)
class Cause:
    """Why one rank failed: an exit code, an exception, or silence."""

    rank: int
    pid: int | None
    exitcode: int | None = None
    raised: Failed | None = None
    silent_for: float | None = None
    stopped: bool = False
    place: str | None = None

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended the rank."""
        return self.exitcode is not None and self.exitcode < 0


@dataclass(frozen=True)
class Verdict:
    """The end of a run. `cause` is None when every rank returned, or when a person aborted it."""

    code: int = 0
    cause: Cause | None = None
    also: tuple[Cause, ...] = ()
    step: int | None = None
    stop_signal: int = 0
    aborted: bool = False

    @property
    def exit_code(self) -> int:
        """0 or the target's own code; 1 a rank failed; 2 a user error; 128 + signal for a wanted stop."""
        if self.cause is not None:
            return USER_ERROR if self.cause.raised and self.cause.raised.user_error else FAILURE
        if self.aborted:
            return 128 + signal.SIGINT
        return self.code or (128 + self.stop_signal if self.stop_signal else 0)


def first_cause(causes: Sequence[Cause]) -> Cause:
    """The failure that the others followed from: a signal, else the earliest exception, else a bare exit."""
    return min(causes, key=lambda one: (not one.by_signal, one.raised.when if one.raised else float("inf")))


def describe(verdict: Verdict, advice: str) -> str:
    """What a person needs to know; empty for a run that ended well.

    Args: advice: how to go on, a sentence of the caller's.
    """
    if verdict.aborted:
        return f"shardwright: aborted; the step was not finished and nothing was saved for it. {advice}"
    if verdict.cause is None:
        return ""
    raised = verdict.cause.raised
    if raised is not None and raised.user_error:
        return raised.text
    after = "before its first step" if verdict.step is None else f"after step {verdict.step}"
    facts = "; ".join(_fact(one) for one in (verdict.cause, *verdict.also))
    line = f"shardwright: {facts} ({after}). The other ranks were ended. {advice}"
    return f"{raised.text.rstrip()}\n{line}" if raised else line


def _fact(cause: Cause) -> str:
    who = f"rank {cause.rank} (process {cause.pid})"
    if cause.silent_for is not None:
        return _silence(cause, who)
    if cause.raised is not None:
        return f"{who} failed: {cause.raised.text.rstrip().splitlines()[-1]}"
    if cause.by_signal:
        return f"{who} was killed by {_signal_text(-(cause.exitcode or 0))}"
    return f"{who} ended by itself with exit code {cause.exitcode} and said no reason"


def _silence(cause: Cause, who: str) -> str:
    why = "is stopped (SIGSTOP or Ctrl-Z; SIGCONT would wake it)" if cause.stopped else "does not answer"
    place = f", last seen at {cause.place}" if cause.place else ""
    return f"{who} {why}: no progress for {cause.silent_for:g} s (--timeout){place}"


def _signal_text(number: int) -> str:
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    reason = _KILLED_BY.get(known)
    return f"{known.name} ({reason})" if reason else known.name
