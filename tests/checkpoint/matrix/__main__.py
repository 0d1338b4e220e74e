"""Every ordered pair of fourteen worlds: exit 1 if one cannot go on from what another one saved.

python -m tests.checkpoint.matrix [--source NAME] [--target NAME] [--timeout SECONDS]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from shardwright.testing.pool import RankPool
from tests.checkpoint.matrix.check import saved_by, wrong_after
from tests.checkpoint.matrix.worlds import WORLDS
from tests.train.worlds import write_text


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.checkpoint.matrix")
    asked.add_argument("--source", action="append", choices=[*WORLDS])
    asked.add_argument("--target", action="append", choices=[*WORLDS])
    asked.add_argument("--timeout", type=float, default=1800, help="of one world, on a machine that is busy")
    given = asked.parse_args()
    bad = count = 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, RankPool(preload=("shardwright.train.step",)) as pool:
        data = Path(name) / "text"
        write_text(data)
        ranks = partial(pool.run, timeout=given.timeout)
        saved = {}
        for source in given.source or WORLDS:
            saved[source] = saved_by(ranks, Path(name), source, data)
            print(f"saved  {source}  {time.perf_counter() - start:.0f} s", flush=True)
        for target in given.target or WORLDS:
            for source, wrong in wrong_after(ranks, saved, target, data).items():
                bad, count = bad + bool(wrong), count + 1
                print(f"{'!!' if wrong else 'ok'}  {source} -> {target} {wrong}".rstrip(), flush=True)
    print(f"{count} pairs, {bad} wrong, {time.perf_counter() - start:.0f} s")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
