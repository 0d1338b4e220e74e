"""`python -m tests.memory`: operators on views in awkward memory, on DTensors beside one device.

Values, strides and storage offsets as torch's own code sees them, what a call writes, and what of a base a
later write into a result reaches, and the other way round.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console

from tests.memory.extras import EXTRAS
from tests.memory.ranks import check_operator
from tests.ops.cases import BAD, Options, Record
from tests.ops.database import operators
from tests.ops.report import failures
from tests.ops.sweep import sweep

PRELOAD = ("torch.testing._internal.common_methods_invocations", "scipy.special", "tests.memory.ranks")


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, report; 0 if every case is right."""
    options = _parser().parse_args(arguments)
    console = Console()
    names = options.ops.split(",") if options.ops else [*operators(), *EXTRAS]
    run = Options(
        mesh=tuple(int(size) for size in options.mesh.split(",")),
        kinds=tuple(options.placements.split(";")) if options.placements else (),
        dtypes=tuple(options.dtypes.split(",")),
        samples=options.samples,
    )
    records: list[Record] = []
    for name, found in sweep(names, [run], jobs=options.jobs, preload=PRELOAD, check=check_operator):
        records += found
        bad = Counter(record.verdict for record in found if record.verdict in BAD)
        if bad:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in bad.items())
            console.print(f"{name}: {counts} of {len(found)}", markup=False)
            console.file.flush()
            if options.failures:
                Path(options.failures).write_text(failures(records))
    verdicts = Counter(record.verdict for record in records)
    console.print(f"{len(names)} operators, {len(records)} cases: {dict(verdicts)}", markup=False)
    return 1 if any(record.verdict in BAD for record in records) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.memory", description=__doc__)
    parser.add_argument("--ops", help="operators, by comma (default: all)")
    parser.add_argument("--placements", help="by semicolon")
    parser.add_argument("--mesh", default="2", help="sizes of the axes")
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--samples", type=int, default=1, help="inputs per operator and dtype")
    parser.add_argument("--jobs", type=int, default=1, help="operators at a time")
    parser.add_argument("--failures", help="write the failures, grouped by operator, to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
