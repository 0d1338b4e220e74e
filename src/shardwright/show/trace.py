"""`trace()`: what a block of code communicated and decided, on this rank."""

from __future__ import annotations

from shardwright.comm.record import Recorder
from shardwright.show.trace_table import TraceTable, tabulate


class Trace(Recorder):
    """What happened between `__enter__` and `__exit__`, on every thread of this rank; traces nest.

    collectives: every one that this rank took part in, in order. decisions: every choice that the program did
    not spell out: implicit redistributions, fallbacks, casts. bytes: what this rank sent to other ranks.
    Not a profiler: it counts and explains, it takes no times.
    """

    def table(self) -> TraceTable:
        """Return one row for each kind of collective and decision, with its reason and source line."""
        return tabulate(self.collectives, self.decisions)

    def __str__(self) -> str:
        return str(self.table())


def trace() -> Trace:
    """Record what a block communicates and decides: `with sw.trace() as t: ...; print(t.table())`.

    Returns: a `Trace`; it can be read inside the block and after it.
    Cost: none for the program's results; a stack walk for each collective while it is active.
    """
    return Trace()
