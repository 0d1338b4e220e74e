"""`python -m tests.witness`: what the process groups were asked to do beside what `sw.trace()` lists."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from shardwright.testing.pool import RankPool

from .programs import OPTIMIZERS, STRATEGIES, compiled, explicit, step, threads
from .witness import Line


def main(arguments: list[str] | None = None) -> int:
    """Run every program, print both counts of it over all ranks; 0 if they agree in all."""
    parser = argparse.ArgumentParser(prog="python -m tests.witness", description=__doc__)
    parser.add_argument("--strategies", default=";".join(STRATEGIES), help="some of them, by semicolon")
    parser.add_argument("--optimizers", default=";".join(OPTIMIZERS), help="some of them, by semicolon")
    options = parser.parse_args(arguments)
    table = Table("program", "ranks", "calls seen", "listed", "bytes seen", "listed", "agree")
    wrong = calls = 0
    with RankPool() as pool:
        for name, world, lines in _programs(
            pool, options.strategies.split(";"), options.optimizers.split(";")
        ):
            seen = sum(line.witnessed for line in lines)
            numbers = (
                seen,
                sum(line.recorded for line in lines),
                sum(line.witnessed_bytes for line in lines),
                sum(line.recorded_bytes for line in lines),
            )
            agree = all(line.agrees for line in lines)
            wrong, calls = wrong + (not agree), calls + seen
            table.add_row(name, str(world), *(f"{number:,}" for number in numbers), "yes" if agree else "NO")
    Console(width=130).print(table)
    Console().print(
        f"{table.row_count} programs, {calls:,} calls seen, {wrong} programs not listed as they ran"
    )
    return 1 if wrong else 0


def _programs(
    pool: RankPool, strategies: Iterable[str], optimizers: Iterable[str]
) -> Iterator[tuple[str, int, list[Line]]]:
    """name, ranks, and the lines of all ranks and parts."""
    optimizers = list(optimizers)
    for strategy in strategies:
        world, _ = STRATEGIES[strategy]
        for optimizer in optimizers:
            parts = pool.run(world, step, strategy, optimizer, timeout=120)
            for part in parts[0]:
                yield f"{strategy}; {optimizer}; {part}", world, [line for one in parts for line in one[part]]
    yield "explicit()", 2, [line for lines, _ in pool.run(2, explicit) for line in lines]
    yield "threads and the program itself", 2, [line for lines in pool.run(2, threads) for line in lines]
    for backend in ("aot_eager", "inductor"):
        outcomes = pool.run(2, compiled, backend, timeout=180)
        for index, which in enumerate(("compiled", "second call of what was compiled")):
            yield f"{which}; {backend}", 2, [line for one in outcomes for line in one[index]]


if __name__ == "__main__":
    sys.exit(main())
