"""`python -m tests.compositions`: strategies together, on real models and ranks, beside one device."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.compositions.cases import VARIANTS, Case, cases, chosen, rotated
from tests.compositions.models import MODELS
from tests.compositions.report import failure, shortened, summary
from tests.compositions.sweep import BAD, Record, sweep


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report; 0 if every case is right or refused for its reason."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.go_on and not options.report:
        parser.error("--go-on asks for the --report of the sweep that ended early")
    console = Console()
    whole = options.all or options.variants
    found = chosen(
        cases() if whole else rotated(cases()),
        models=options.models,
        strategies=options.strategies,
        variants=options.variants,
    )
    done = _done(Path(options.report)) if options.go_on else frozenset()
    wanted = [case for case in found[:: options.every] if str(case) not in done]
    if options.list:
        for case in wanted:
            console.print(str(case), markup=False, soft_wrap=True)
        return 0
    start = time.monotonic()
    records = _tried(wanted, options, console)
    summary(records, time.monotonic() - start, console)
    return 1 if not (records or done) or any(record.verdict in BAD for record in records) else 0


def _done(report: Path) -> frozenset[str]:
    """The cases that the report of a sweep that ended early holds as they should be."""
    if not report.exists():
        return frozenset()
    lines = (line.split("\t") for line in report.read_text().splitlines())
    return frozenset(case for verdict, _, case, *_ in lines if verdict not in BAD)


def _tried(wanted: list[Case], options: argparse.Namespace, console: Console) -> list[Record]:
    records: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        mode = "a" if options.go_on else "w"
        report = stack.enter_context(Path(options.report).open(mode)) if options.report else None
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        task = progress.add_task("compositions", total=len(wanted))
        for record in sweep(wanted, jobs=options.jobs, erased=options.erased):
            records.append(record)
            if record.verdict in BAD:
                console.print(failure(record), markup=False, soft_wrap=True)
                console.file.flush()
            if report is not None:
                report.write(
                    f"{record.verdict}\t{record.seconds:.2f}\t{record.case}\t{shortened(record.text)!r}\n"
                )
                report.flush()
            progress.advance(task)
    return records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.compositions", description=__doc__)
    parser.add_argument("--models", default="", help=f"by comma, of: {', '.join(MODELS)} (default: all)")
    parser.add_argument("--strategies", default="", help="sets by comma, as in tensor+fsdp (default: all)")
    parser.add_argument("--variants", default="", help=f"by comma, of: {', '.join(VARIANTS)} (default: five)")
    parser.add_argument("--all", action="store_true", help="every variant of every composition")
    parser.add_argument("--every", type=int, default=1, help="only each n-th of the cases")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--erased", action="store_true", help="each step as an erased function")
    parser.add_argument("--list", action="store_true", help="print the cases, run none")
    parser.add_argument("--report", help="write every record to this file, a line each")
    parser.add_argument(
        "--go-on", action="store_true", help="leave out what the report has as it should be, and add to it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
