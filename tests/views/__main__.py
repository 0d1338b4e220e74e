"""The whole sweep: `python -m tests.views [--samples N] [--pairs N] [--seed N] [--worlds 2 3] [names ...]`.

Every input of every view of torch's operator database, under every partition on meshes (2) and (3) and under
pairs of them, in both orders of application, on (2, 2) and (2, 3). The last line says how many cases there
were, how many bytes they moved and how many errors there were. 28,000 cases: a quarter of an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError
from tests.views.sweep import NAMES, run


def main() -> int:
    """Print the counts of each world and of all; 1 if a view moved a byte, was wrong or raised."""
    parser = argparse.ArgumentParser(prog="python -m tests.views", description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=1000, help="inputs of each operator")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of placements on two axes")
    parser.add_argument("--seed", type=int, default=0, help="which pairs")
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 3, 4, 6])
    parser.add_argument("--show", type=int, default=20, help="failures to print")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one operator")
    parser.add_argument("--verbose", action="store_true", help="a line per operator")
    given = parser.parse_args()
    total: Counter[str] = Counter()
    with RankPool(preload=("hypothesis", "pytest", "expecttest")) as pool:
        for world in given.worlds:
            failures: list[str] = []
            counts: Counter[str] = Counter()
            for name in given.names or NAMES:
                try:
                    arguments = [name], given.samples, given.pairs, given.seed
                    results = pool.run(world, run, *arguments, timeout=given.timeout)
                except RankError as error:  # ranks that part ways after an error on one of them
                    failures.append(f"{name}: {str(error)[:300]}")
                    counts["errors"] += 1
                    continue
                counts += _of_all_ranks([found for found, _ in results])
                failures += [line for _, told in results for line in told]
                if given.verbose:
                    print(f"  {name}: {dict(results[0][0])}", flush=True)
            print(f"{world} ranks: {dict(counts)}", flush=True)
            for line in sorted(set(failures))[: given.show]:
                print("  ", line)
            total.update(counts)
    torn = f"{total['torn']} with complex numbers torn by a cut, which move, apart"
    print(f"all: {total['cases']} cases ({torn}), {total['bytes']} bytes moved, {total['errors']} errors")
    return int(bool(total["bytes"] or total["errors"]))


def _of_all_ranks(counts: list[Counter[str]]) -> Counter[str]:
    """Cases are the same on every rank; bytes add up; what went wrong on any rank went wrong."""
    found = Counter({name: max(c[name] for c in counts) for name in ("cases", "torn", "moved", "errors")})
    found["bytes"] = sum(c["bytes"] for c in counts)
    return +found


if __name__ == "__main__":
    sys.exit(main())
