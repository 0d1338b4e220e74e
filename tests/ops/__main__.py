"""`python -m tests.ops`: every operator of torch's database on DTensors beside one device, on real ranks."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.testing.pool import RankPool
from tests.ops.cases import BAD, Options, Record
from tests.ops.database import SAMPLE, SOURCES, operators
from tests.ops.excluded import EXCLUDED
from tests.ops.modes import MODES, WITHOUT_GRADIENTS
from tests.ops.placing import KINDS, MORE_KINDS, UNLIKE
from tests.ops.report import failures, summary
from tests.ops.sweep import sweep


def main(arguments: list[str] | None = None, pool: RankPool | None = None) -> int:
    """Parse, run, report; 0 if every case is right. With a `pool`, on its ranks."""
    options = _parser().parse_args(arguments)
    console = Console()
    known = operators()
    names = list(known) if options.all or not options.ops else options.ops.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        console.print(f"no such operators, or excluded: {', '.join(unknown)}", markup=False)
        return 2
    runs = [
        Options(
            mesh=tuple(int(size) for size in mesh.split(",")),
            kinds=tuple(options.placements.split(";")) if options.placements else (),
            dtypes=tuple(options.dtypes.split(",")),
            samples=options.samples,
            backward=not options.no_backward and options.under not in WITHOUT_GRADIENTS,
            under=options.under,
            source=options.inputs,
        )
        for mesh in options.mesh.split(";")
    ]
    start = time.monotonic()
    records = _checked(names, runs, options, console, pool)
    summary(records, time.monotonic() - start, len(names), len(EXCLUDED), console)
    if options.failures:
        Path(options.failures).write_text(failures(records))
    return 1 if any(record.verdict in BAD for record in records) else 0


def _checked(
    names: list[str],
    runs: list[Options],
    options: argparse.Namespace,
    console: Console,
    pool: RankPool | None,
) -> list[Record]:
    records: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        report = stack.enter_context(Path(options.report).open("w")) if options.report else None
        progress = stack.enter_context(Progress(*columns, console=console, disable=not console.is_terminal))
        task = progress.add_task("operators", total=len(names))
        for name, found in sweep(names, runs, jobs=options.jobs, pool=pool):
            records += found
            bad = Counter(record.verdict for record in found if record.verdict in BAD)
            if bad:
                counts = ", ".join(f"{count} {verdict}" for verdict, count in bad.items())
                console.print(f"{name}: {counts} of {len(found)}", markup=False)
                console.file.flush()
            if report is not None:
                report.writelines(json.dumps(record.as_dict()) + "\n" for record in found)
                report.flush()
            progress.advance(task)
    return records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.ops", description=__doc__)
    parser.add_argument("--ops", help="operators, by comma (default: all)")
    parser.add_argument("--all", action="store_true", help="every operator of the database")
    kinds = "; ".join([*KINDS, *MORE_KINDS, *UNLIKE])
    parser.add_argument("--placements", help=f"by semicolon, of: {kinds} (default: {', '.join(KINDS)})")
    parser.add_argument("--mesh", default="2;2,2", help="sizes of the axes; several meshes by semicolon")
    parser.add_argument("--dtypes", default="float32,int64")
    parser.add_argument("--samples", type=int, default=3, help="inputs per operator and dtype")
    parser.add_argument("--inputs", choices=SOURCES, default=SAMPLE, help="which inputs of the database")
    parser.add_argument("--jobs", type=int, default=2, help="operators at a time")
    parser.add_argument("--no-backward", action="store_true")
    parser.add_argument("--under", choices=MODES, default="", help="a mode of torch in which all runs")
    parser.add_argument("--report", help="write every record to this file, one JSON object per line")
    parser.add_argument("--failures", help="write the failures, grouped by operator, to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
