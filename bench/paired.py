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
    """Seconds per call of ours and theirs, their ratio, and the ratio of ours against itself."""

    name: str
    ours: float
    theirs: float
    ratio: float
    noise: float

    def row(self) -> str:
        """Return one line of the report."""
        return (
            f"{self.name:<44} {self.ours * 1e6:>10.1f} {self.theirs * 1e6:>10.1f} "
            f"{self.ratio:>8.2f} {self.noise:>8.2f}"
        )


HEADER = f"{'':<44} {'ours us':>10} {'torch us':>10} {'ratio':>8} {'A vs A':>8}"


def compare(name: str, ours: Program, theirs: Program, *, calls: int = 100, turns: int = 31) -> Comparison:
    """Let two programs take turns, `calls` calls each; and ours against itself in the same turns.

    Args:
        name: what the report calls it.
        ours: our program.
        theirs: the peer's.
        calls: calls per turn.
        turns: odd number of turns.
    Returns: medians over the turns.
    """
    for program in (ours, theirs):
        _time(program, calls)
    rows = [_turn((ours, theirs, ours), calls, first=turn % 3) for turn in range(turns)]
    return Comparison(
        name,
        ours=statistics.median(mine for mine, _, _ in rows),
        theirs=statistics.median(peer for _, peer, _ in rows),
        ratio=statistics.median(mine / peer for mine, peer, _ in rows),
        noise=statistics.median(mine / again for mine, _, again in rows),
    )


def _turn(programs: tuple[Program, Program, Program], calls: int, *, first: int) -> tuple[float, ...]:
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
