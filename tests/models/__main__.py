"""`python -m tests.models`: architectures of `transformers`, sharded and as they are, beside one device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from tests.models.check import MORE_SHARDINGS, SHARDINGS, check
from tests.models.configs import BY_NAME, CHOSEN
from tests.models.forms import FORMS, check_form

_PRELOAD = ("shardwright.parallel", "torch.distributed.tensor", "transformers")


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report; 0 if every case equals one device."""
    options = _parser().parse_args(arguments)
    console = Console()
    names = _names(options)
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        console.print(f"no such architectures: {', '.join(unknown)}", markup=False)
        return 2
    shardings, forms = options.shardings.split(","), _forms(options)
    cases = [(name, form, sharding) for name in names for form in forms for sharding in shardings]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    right = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("models", total=len(cases))
        for case, differing in _checked(cases, options.world):
            right += not differing
            for line in differing:
                console.print(f"{case}: {line}", markup=False)
            progress.advance(task)
    console.print(f"{right} of {len(cases)}")
    return 0 if right == len(cases) else 1


def _names(options: argparse.Namespace) -> list[str]:
    if options.all:
        return list(BY_NAME)
    return options.models.split(",") if options.models else [row.name for row in CHOSEN]


def _forms(options: argparse.Namespace) -> list[str]:
    if options.forms == "all":
        return list(FORMS)
    return options.forms.split(";") if options.forms else [""]


def _checked(cases: list[tuple[str, str, str]], world: int) -> Iterator[tuple[str, list[str]]]:
    with RankPool(preload=_PRELOAD) as pool:
        for name, form, sharding in cases:
            run = (check_form, name, form, sharding) if form else (check, name, sharding)
            try:
                found = pool.run(world, *run, timeout=300)
                differing = list(dict.fromkeys(line for lines in found for line in lines))
            except (RankError, RankTimeoutError) as error:
                differing = [str(error)]
            yield ", ".join(filter(None, (name, form, sharding))), differing


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("--models", help=f"by comma, of: {', '.join(BY_NAME)} (default: the first 20)")
    parser.add_argument("--all", action="store_true", help="every architecture of the table")
    parser.add_argument(
        "--shardings",
        default=",".join(SHARDINGS),
        help=f"by comma, of: {', '.join(SHARDINGS + MORE_SHARDINGS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--forms",
        help=f"ways to use a model, by semicolon, instead of a plain step: all, or {'; '.join(FORMS)}",
    )
    parser.add_argument("--world", type=int, default=2, help="ranks (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
