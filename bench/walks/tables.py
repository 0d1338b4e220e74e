"""The tables of `python -m bench.walks`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from bench.walks import source
from bench.walks.ceilings import Numbers
from bench.walks.counting import Count
from bench.walks.walk import WALKS

_MOST_FUNCTIONS = 6


def summary(found: Numbers, peer: Numbers, ceilings: Numbers) -> Table:
    """One row per walk, and the size of the source."""
    table = Table("walk", "what is counted", *("today", "torch", "goal", "ceiling"))
    for column in table.columns[2:]:
        column.justify, column.no_wrap = "right", True
    for name, numbers in found.items():
        walk = WALKS.get(name)
        goal = walk.goal if walk else source.GOAL
        sides = (numbers, peer.get(name, {}), goal, ceilings.get(name, {}))
        table.add_row(
            walk.title if walk else name, " / ".join(numbers), *(_side(side, numbers) for side in sides)
        )
    return table


def by_file(name: str, count: Count) -> Table:
    """The files that a walk enters, most calls first, and their functions."""
    table = Table("calls", "file", "functions", title=f"{WALKS[name].title}: {_side(count.numbers)}")
    for file, functions in count.by_file():
        named = [f"{function} {calls}" for function, calls in functions.most_common(_MOST_FUNCTIONS)]
        more = len(functions) - _MOST_FUNCTIONS
        table.add_row(
            str(functions.total()), file, ", ".join(named) + (f", and {more} more" if more > 0 else "")
        )
    return table


def _side(numbers: Mapping[str, int], shown: Mapping[str, int] | None = None) -> str:
    told = (numbers.get(what) for what in shown or numbers)
    return " / ".join("-" if number is None else f"{number:,}" for number in told)
