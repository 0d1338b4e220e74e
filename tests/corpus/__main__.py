"""`python -m tests.corpus`: what the library decides in tens of thousands of cases, beside what is stored."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.corpus import stored
from tests.corpus.catalog import chosen
from tests.corpus.report import changed, show_ops, show_rows
from tests.corpus.row import Digests, Row, digests
from tests.corpus.run import run, run_shuffled
from tests.corpus.unit import Unit

_TOLD_EVERY = 500


def main(arguments: list[str] | None = None) -> int:
    """Run, compare, report; 0 if nothing differs."""
    options, console = _parser().parse_args(arguments), Console()
    units = chosen(_words(options.families), _words(options.ops), sample=options.sample)
    if not units:
        console.print("there is no such family or op")
        return 2
    start = time.monotonic()
    families = _words(options.families)
    rows = [row for row in _run(units, options, console) if not families or row.family in {*families, "died"}]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    console.print(
        f"{len(rows):,} rows of {len(digests(rows)):,} ops in {time.monotonic() - start:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of one core",
        highlight=False,
    )
    if options.rows:
        Path(options.rows).write_text("".join(f"{row}\n" for row in sorted(rows)))
    if options.against:
        return _against(Path(options.against), rows, options.limit, console)
    if options.shuffle is not None:
        return 0
    if any(row.family == "died" for row in rows):
        console.print(*(row for row in rows if row.family == "died"), sep="\n", markup=False)
        return 2
    return _accept(digests(rows), console) if options.accept else _compare(digests(rows), console)


def _words(text: str | None) -> set[str]:
    return set(text.split(";")) if text else set()


def _run(units: Sequence[Unit], options: argparse.Namespace, console: Console) -> list[Row]:
    shuffled = options.shuffle is not None
    parts = run_shuffled(units, options.jobs, options.shuffle) if shuffled else run(units, options.jobs)
    rows: set[Row] = set()  # an ATen call that two operators make is one case
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("ops", total=None if shuffled else len(units))
        for number, part in enumerate(parts, 1):
            rows.update(part)
            progress.advance(task)
            if number % _TOLD_EVERY == 0 and not console.is_terminal:
                console.print(f"{number} ops, {len(rows)} rows", highlight=False)
                console.file.flush()
    return sorted(rows)


def _against(file: Path, rows: Sequence[Row], limit: int, console: Console) -> int:
    """Compare with the rows of a file, as `--rows` writes it."""
    before = [Row.from_line(line) for line in file.read_text().splitlines()]
    found = changed(before, rows)
    show_rows(found, limit, console)
    console.print(f"{len(found):,} rows differ from {file}", highlight=False)
    return 1 if found else 0


def _compare(now: Digests, console: Console) -> int:
    """Compare with what is stored, as far as it was run."""
    if stored.stored_version() != stored.version():
        console.print(f"stored with torch {stored.stored_version()}, whose samples are not those of this one")
        return 2
    known = {key: digest for key, digest in stored.read().items() if key in now}
    found = stored.differences(known, now)
    if found:
        show_ops(found, console)
    console.print(f"{len(found):,} of {len(now):,} ops differ from what is stored", highlight=False)
    return 1 if found else 0


def _accept(now: Digests, console: Console) -> int:
    """Store what was run; what was not run stays as it is, unless all was."""
    stored.write({**stored.read(), **now})
    console.print(f"stored {len(now):,} ops", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("--families", help="some of them, by semicolon (default: all)")
    parser.add_argument("--ops", help="some of them, by semicolon (default: all)")
    parser.add_argument("--sample", action="store_true", help="what every run of the tests checks")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--rows", metavar="FILE", help="write all rows to this file, one per line, sorted")
    parser.add_argument("--against", metavar="FILE", help="compare with the rows of this file")
    parser.add_argument("--limit", type=int, default=40, help="how many differing rows to print")
    parser.add_argument("--accept", action="store_true", help="store the hashes of what was run")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="run each family in one process and in random order"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
