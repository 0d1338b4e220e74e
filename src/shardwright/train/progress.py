"""What rank 0 shows while a run goes on."""

from __future__ import annotations

import math
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardwright.train.metrics import StepRecord

LINES_OF_A_RUN = 20
REFRESHES_PER_SECOND = 2


class Display:
    """Shows each step: a live bar on a terminal, a plain line now and then elsewhere.

    A thread of its own draws the bar from the last record it was given, so `show` costs a few microseconds
    and no rank waits for a terminal. A rank that is not the first shows nothing.
    """

    def __init__(self, steps: int, experts: int, *, quiet: bool) -> None:
        self.steps, self.experts = steps, experts
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._held_out: float | None = None
        self._task = TaskID(0)
        self._bar = self._make_bar() if self.console.is_terminal and not quiet else None

    def start(self, done: int, headline: str) -> None:
        """Say what the run is, and that it has `done` steps behind it."""
        self.say(headline)
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self.steps, completed=done, facts="starting")

    def _make_bar(self) -> Progress:
        return Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=REFRESHES_PER_SECOND,
        )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False)

    def show(self, record: StepRecord) -> None:
        """Report a finished step."""
        measured = record.held_out_loss is not None
        if measured:
            self._held_out = record.held_out_loss
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, facts=self._facts(record))
        elif measured or record.step == 1 or record.step % max(1, self.steps // LINES_OF_A_RUN) == 0:
            self.say(f"step {record.step}/{self.steps}  {self._facts(record)}")

    def _facts(self, record: StepRecord) -> str:
        held_out = "-" if self._held_out is None else f"{self._held_out:.3f}"
        return (
            f"loss {record.loss:.3f}  held out {held_out}  loads {record.load_entropy:.2f} of "
            f"{math.log(self.experts):.2f} nats  {record.tokens_per_second:,.0f} tokens/s  "
            f"{_bytes(record.bytes_communicated)}/step"
        )


def _bytes(count: int) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
