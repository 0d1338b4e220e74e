"""Paired timing: two programs take turns, and the ratio of each turn is what counts.

A machine's speed changes by more than the difference that one wants to see. Two programs that take turns see
the same machine; the median of the ratios is stable where the times are not. The same is done with a program
against itself: that ratio must be 1, and how far it is from 1 is what this run can resolve.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Program = Callable[[], object]


@dataclass(frozen=True)
class Comparison:
    """Seconds per call of ours and theirs, their ratio, and the ratio of ours against itself.

    plain, over_plain: seconds of what both stand around, and the ratio of what each needs above that.
    """

    name: str
    ours: float
    theirs: float
    ratio: float
    noise: float
    plain: float | None = None
    over_plain: float | None = None

    def row(self) -> str:
        """Return one line of the report."""
        return (
            f"{self.name:<44} {self.ours * 1e6:>10.1f} {self.theirs * 1e6:>10.1f} "
            f"{self.ratio:>8.2f} {self.noise:>8.2f}"
        ) + ("" if self.plain is None else f" {self.plain * 1e6:>10.1f} {self.over_plain:>8.2f}")


HEADER = f"{'':<44} {'ours us':>10} {'torch us':>10} {'ratio':>8} {'A vs A':>8}"
HEADER_OVER_PLAIN = f"{HEADER} {'plain us':>10} {'over it':>8}"


def compare(
    name: str,
    ours: Program,
    theirs: Program,
    *,
    plain: Program | None = None,
    calls: int = 100,
    turns: int = 31,
) -> Comparison:
    """Let two programs take turns, `calls` calls each; and ours against itself in the same turns.

    Args:
        name: what the report calls it.
        ours: our program.
        theirs: the peer's.
        plain: what both stand around: the same on plain tensors.
        calls: calls per turn.
        turns: odd number of turns.
    Returns: medians over the turns.
    """
    programs = (ours, theirs, ours) if plain is None else (ours, theirs, ours, plain)
    for program in programs:
        _time(program, calls)
    rows = [_turn(programs, calls, first=turn % len(programs)) for turn in range(turns)]
    median = statistics.median
    return Comparison(
        name,
        ours=median(row[0] for row in rows),
        theirs=median(row[1] for row in rows),
        ratio=median(row[0] / row[1] for row in rows),
        noise=median(row[0] / row[2] for row in rows),
        plain=None if plain is None else median(row[3] for row in rows),
        over_plain=None if plain is None else median((row[0] - row[3]) / (row[1] - row[3]) for row in rows),
    )


def _turn(programs: tuple[Program, ...], calls: int, *, first: int) -> tuple[float, ...]:
    """Time each program once, beginning with another one each turn."""
    seconds = [0.0] * len(programs)
    for step in range(len(programs)):
        index = (first + step) % len(programs)
        seconds[index] = _time(programs[index], calls)
    return tuple(seconds)


def _time(program: Program, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        program()
    return (time.perf_counter() - start) / calls
