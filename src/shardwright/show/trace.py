"""`trace()`: what a block of code communicated and decided, on this rank."""

from __future__ import annotations

from typing import Self

from shardwright.comm.record import Decision, Event, Recorder
from shardwright.show.trace_table import TraceTable, tabulate


class Trace:
    """What happened between `__enter__` and `__exit__`, on every thread of this rank; traces nest.

    Not a profiler: it counts and explains, it takes no times.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()

    @property
    def collectives(self) -> list[Event]:
        """Every collective that this rank took part in, in order."""
        return self._recorder.collectives

    @property
    def decisions(self) -> list[Decision]:
        """Every choice that the program did not spell out: implicit redistributions, fallbacks, casts."""
        return self._recorder.decisions

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent to other ranks."""
        return self._recorder.bytes

    def table(self) -> TraceTable:
        """Return one row for each kind of collective and decision, with its reason and source line."""
        return tabulate(self.collectives, self.decisions)

    def __enter__(self) -> Self:
        self._recorder.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._recorder.__exit__(*error)

    def __str__(self) -> str:
        return str(self.table())


def trace() -> Trace:
    """Record what a block communicates and decides: `with sw.trace() as t: ...; print(t.table())`.

    Returns: a `Trace`; it can be read inside the block and after it.
    Cost: none for the program's results; a stack walk for each collective while it is active.
    """
    return Trace()
