"""The whole sweep: `python -m tests.views [--samples N] [--pairs N] [--worlds 2 3 4 6] [names ...]`."""

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
                    results = pool.run(world, run, [name], given.samples, given.pairs, timeout=given.timeout)
                except RankError as error:  # ranks that part ways after an error on one of them
                    failures.append(f"{name}: {str(error)[:300]}")
                    counts["errors"] += 1
                    continue
                counts.update(results[0][0])
                if given.verbose:
                    print(f"  {name}: {dict(results[0][0])}", flush=True)
                failures += [line for _, told in results for line in told]
            print(f"{world} ranks: {dict(counts)}")
            for line in sorted(set(failures))[: given.show]:
                print("  ", line)
            total.update(counts)
    print(f"all: cases {total['cases']}, moved {total['moved']}, errors {total['errors']}")
    return int(bool(total["moved"] or total["errors"]))


if __name__ == "__main__":
    sys.exit(main())
