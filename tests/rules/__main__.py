"""`python -m tests.rules`: every rule checked, every fact in every form, every planted wrong rule caught."""

from __future__ import annotations

import argparse
import sys
import time

import torch
from rich.console import Console

from shardwright.testing.pool import RankPool
from shardwright.testing.simulate import Sample
from tests.progress import told
from tests.rules.catalog import Overload, Tally, calls, check_all
from tests.rules.forms import Tried, check_forms, has_facts, smallest
from tests.rules.planted import is_caught, mutants

_TOGETHER = 20


def main(arguments: list[str] | None = None) -> int:
    """Check, plant, print both numbers; 0 if no rule is wrong and no planted one passes."""
    parser = argparse.ArgumentParser(prog="python -m tests.rules", description=__doc__)
    parser.add_argument("--samples", type=int, default=8, help="inputs per operator and dtype to capture")
    parser.add_argument("--per-op", type=int, default=12, help="captured calls per ATen overload to check")
    parser.add_argument("--per-form", type=int, default=2, help="calls per overload to try in every form")
    parser.add_argument("--ops", help="only overloads whose name has one of these words, by comma")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, start, tally = Console(), time.process_time(), Tally()
    found = calls(samples=options.samples)
    if options.ops:
        words = options.ops.split(",")
        found = {op: samples for op, samples in found.items() if any(word in op.name() for word in words)}
    checking = check_all(found, tally, per_op=options.per_op, worlds=(2, 3))
    for _ in told(checking, "rules", len(found), console):
        pass
    for text in tally.wrong:
        console.print(text, markup=False)
    cut = sum(1 for cuts in tally.cuts.values() if cuts)
    seen = f"{tally.report.checks:,} equations of {cut} of the {len(found)} ATen overloads that were called"
    console.print(
        f"{len(tally.wrong)} wrong: {seen}; {len(tally.unseen())} rules of the catalog met no call",
        style="bold red" if tally.wrong else "bold green",
    )
    tried = _in_every_form(found, console, count=options.per_form)
    missed = [] if options.ops else _missed(console)
    console.print(f"{time.process_time() - start:.0f} s of one core, and two ranks")
    return 1 if tally.wrong or tried.wrong or missed else 0


def _in_every_form(found: dict[Overload, list[Sample]], console: Console, *, count: int) -> Tried:
    """The facts on real ranks, a few calls at a time."""
    chosen = [(op.name(), s) for op, taken in found.items() if has_facts(op) for s in smallest(taken, count)]
    tried = Tried()
    with RankPool(preload=("shardwright",)) as pool:
        starts = range(0, len(chosen), _TOGETHER)
        for i in told(starts, "forms", len(starts), console):
            one, other = pool.run(2, check_forms, chosen[i : i + _TOGETHER], timeout=600)
            tried += one
            if one.forms != other.forms:
                tried.wrong.append(f"ranks disagree on what they tried: {one} and {other}")
    for text in tried.wrong:
        console.print(text, markup=False)
    console.print(f"{len(tried.wrong)} wrong: {tried}", style="bold red" if tried.wrong else "bold green")
    return tried


def _missed(console: Console) -> list[str]:
    """Planted rules that pass, which none must."""
    every = mutants()
    tried = told(every, "planted", len(every), console)
    missed = [f"{op.name()}: {mutant}" for op, mutant in tried if not is_caught(op, mutant)]
    console.print(
        f"{len(every) - len(missed)} of {len(every)} planted wrong rules are caught",
        style="bold red" if missed else "bold green",
    )
    for text in missed:
        console.print(f"  not caught: {text}", markup=False)
    return missed


if __name__ == "__main__":
    sys.exit(main())
