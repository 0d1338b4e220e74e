"""`python -m tests.laws`: the full run of the laws of placements and redistribution, with a count.

The lists of tensors that move together run on real ranks, after the others.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardwright.testing import RankError, RankPool
from tests.laws.draws import MESHES, SHAPES
from tests.laws.laws import LAWS, BrokenLawError, Tally
from tests.laws.lists import lists

LISTS = 600
DEFAULTS = {"round trips": 100_000, "redistributions": 20_000, "refused by name": 2_000}


def run(counts: dict[str, int], seed: int, console: Console) -> Tally:
    """Check each law so many times; one seed gives one run.

    Raises: BrokenLawError: at the first draw that breaks a law.
    """
    tally = Tally()
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for law, count in counts.items():
            checks = LAWS[law](random.Random(f"{seed} {law}"), tally)
            for _ in progress.track(range(count), description=law):
                next(checks)
    return tally


def run_lists(count: int, seed: int, console: Console) -> None:
    """Check so many lists of tensors on real ranks.

    Raises: RankError: at the first one that is not what its members are alone.
    """
    with RankPool(preload=("hypothesis", "tests.laws.lists")) as pool:
        done = sum(lists(pool, seed, count), Counter())
    checks = ", ".join(f"{number:,} {check.replace('_', ' ')}" for check, number in done.items())
    console.print(f"{count:,} lists of tensors on 2 to 8 ranks: {checks}", style="bold green")


def report(tally: Tally, seconds: float, console: Console) -> None:
    """Print what was checked: per placement, and in all."""
    table = Table("placement", *DEFAULTS)
    for name in sorted({name for _, name in tally.placements}):
        table.add_row(name, *(f"{tally.placements[law, name]:,}" for law in DEFAULTS))
    console.print(table)
    meshes = ", ".join("x".join(map(str, mesh.sizes)) for mesh in MESHES)
    console.print(f"meshes {meshes}; {len(SHAPES)} shapes; {len(tally.pairs)} ordered pairs of placements")
    counted = ", ".join(f"{tally.cases[law]:,} {law}" for law in tally.cases)
    console.print(f"all laws hold: {counted}; in {seconds:.0f} s of one core", style="bold green")


def main() -> int:
    """Parse the counts and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.laws", description=__doc__)
    for law, count in DEFAULTS.items():
        parser.add_argument(f"--{law.replace(' ', '-')}", dest=law, type=int, default=count, metavar="N")
    parser.add_argument("--lists", type=int, default=LISTS, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)
    console, seed, count = Console(), options.pop("seed"), options.pop("lists")
    start = time.process_time()
    try:
        tally = run(options, seed, console)
        run_lists(count, seed, console)
    except (BrokenLawError, RankError) as error:
        console.print(f"a law is broken (seed {seed}):", style="bold red")
        console.print(str(error), markup=False)
        return 1
    report(tally, time.process_time() - start, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
