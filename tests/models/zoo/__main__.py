"""`python -m tests.models.zoo`: causal models of `transformers` under each strategy, beside one device."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from rich.console import Console
from rich.progress import track

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from tests.models.zoo.tiny import batch, build, kinds
from tests.models.zoo.ways import NO_PLAN, WAYS, check

_ON_FOUR = ("context, tensor", "fsdp, tensor")
_PRELOAD = ("shardwright.parallel", "transformers")


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report; 0 if every case equals one device or is refused by one of our own errors."""
    options = _parser().parse_args(arguments)
    console, told = Console(), Counter[str]()
    names = options.models.split(",") if options.models else kinds()
    ways = options.ways.split(";") if options.ways else list(WAYS)
    cases = [(name, way) for name in names for way in ways]
    with RankPool(preload=_PRELOAD) as pool:
        for name, way in track(cases, "zoo", console=console, disable=not console.is_terminal):
            verdict, lines = _verdict(pool, name, way)
            told[verdict] += 1
            for line in lines:
                console.print(f"{name}, {way}: {verdict}: {line}", markup=False, highlight=False)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in sorted(told.items())))
    return 1 if told["wrong"] or told["failed"] else 0


def _verdict(pool: RankPool, name: str, way: str) -> tuple[str, list[str]]:
    try:
        ranks = 4 if way in _ON_FOUR else 2
        found = pool.run(ranks, check, name, way, timeout=150)
        lines = list(dict.fromkeys(line for lines in found for line in lines))
    except RankTimeoutError as error:
        return "failed", [str(error)]
    except RankError as error:
        cause = error.__cause__
        if type(cause).__module__ == "shardwright.errors":
            return "refused", [str(cause).replace("\n", " ")]
        return ("failed" if _is_made(name) else "not made"), [f"{type(cause).__name__}: {cause}"]
    return (NO_PLAN, []) if lines == [NO_PLAN] else ("wrong" if lines else "right", lines[:3])


def _is_made(name: str) -> bool:
    """Does one device make it of such sizes, and run it?"""
    try:
        build(name)(**batch(12)).loss.backward()
    except Exception:  # noqa: BLE001  whatever the architecture says
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.models.zoo", description=__doc__)
    parser.add_argument("--models", help="by comma (default: all that this release has)")
    parser.add_argument("--ways", help=f"by semicolon, of: {'; '.join(WAYS)} (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
