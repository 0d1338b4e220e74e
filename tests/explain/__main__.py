"""`python -m tests.explain`: what `explain` and `explicit` say of ops beside what a trace of them lists."""

from __future__ import annotations

import argparse
import sys
from math import prod

from rich.console import Console
from rich.table import Table

from shardwright.testing.pool import RankPool
from tests.explain.agreement import composite, sample
from tests.ops.database import operators
from tests.ops.placing import KINDS, MORE_KINDS, UNLIKE

_MESHES = ((2,), (3,), (2, 2))


def main(arguments: list[str] | None = None) -> int:
    """Print, for each kind of placements and mesh, how many calls agree; 0 if all do."""
    parser = argparse.ArgumentParser(prog="python -m tests.explain", description=__doc__)
    kinds = [*KINDS, *MORE_KINDS, *UNLIKE]
    parser.add_argument("--placements", default="; ".join(kinds), help="some of them, by semicolon")
    parser.add_argument("--mesh", default="; ".join(",".join(map(str, m)) for m in _MESHES))
    parser.add_argument("--all", action="store_true", help="every operator of the database, not the sample")
    options = parser.parse_args(arguments)
    meshes = [tuple(map(int, text.split(","))) for text in options.mesh.split(";")]
    console = Console(width=130)
    table = Table("placements", "mesh", "calls", "differ", "not told", "which")
    calls, differing, untold = 0, [], 0
    with RankPool() as pool:
        runs = [(kind.strip(), mesh) for kind in options.placements.split(";") for mesh in meshes]
        names = sorted(operators()) if options.all else None
        for kind, mesh in [*runs, ("ops of others", (2,))]:
            work = (composite,) if kind == "ops of others" else (sample, [kind], names, mesh)
            said = pool.run(prod(mesh), *work, timeout=1800)
            found = sorted({text for one in said for text in one.differing})
            silent = sorted({name for one in said for name in one.untold})
            calls, untold = calls + said[0].compared, untold + len(silent)
            differing += found
            numbers = (said[0].compared, len(found), len(silent))
            table.add_row(kind, str(mesh), *map(str, numbers), ", ".join(silent))
            console.print(f"{kind} on {mesh}: {numbers[0]} calls, {numbers[1]} differ", highlight=False)
    console.print(table)
    for text in differing:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{calls:,} calls, {len(differing)} differ; {untold} have no rehearsal, as data decide them"
    )
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
