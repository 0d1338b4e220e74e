"""Every fault on checkpoints, ours beside torch's; exit 1 if one is not survived.

    python -m tests.checkpoint.faults [--flips 2000] [--kills 300]

Kills at every file operation are in `tests/checkpoint/test_crash.py`.
"""

from __future__ import annotations

import argparse
import errno
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.checkpoint.faults import kills, peer, sweep


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.checkpoint.faults")
    asked.add_argument("--flips", type=int, default=2000)
    asked.add_argument("--kills", type=int, default=300)
    asked.add_argument("--peer", type=int, default=200, help="flipped bits in a checkpoint of torch's")
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bad = told("killed at random moments", kills.random_moments(folder / "k", given.kills, given.seed))
        bad += told("flipped bits", sweep.flips(folder / "flips", given.flips, given.seed))
        bad += told("files", sweep.files(folder / "files"))
        for code in (errno.EIO, errno.ENOSPC):
            for lasting in (False, True):
                for over in (False, True):
                    what = f"{errno.errorcode[code]}{', lasting' * lasting}{', over another' * over}"
                    bad += told(what, sweep.errors(folder / "e", code, lasting=lasting, over=over))
        bad += told("EIO of a load", sweep.read_errors(folder / "r"))
        bad += told("folders made to harm", sweep.hostile_folders(folder / "h"))
        bad += told("not ours", [*sweep.strangers(folder / "s"), *sweep.beside(folder / "b")])
        if given.peer:
            print(
                f"torch's DCP, {given.peer} flipped bits: {peer.flips(folder / 'p', given.peer, given.seed)}"
            )
    return 1 if bad else 0


def told(what: str, verdicts: Iterable[tuple[str, str]]) -> int:
    """Print a family; how many of its faults were not survived."""
    start = time.perf_counter()
    found = list(verdicts)
    bad = [one for one in found if one[1]]
    took = time.perf_counter() - start
    print(
        f"{what:32} {len(found) - len(bad):5} of {len(found):5} as they must be   {took:6.1f} s", flush=True
    )
    for name, why in bad[:5]:
        print(f"    {name}: {why[:300]}")
    return len(bad)


if __name__ == "__main__":
    sys.exit(main())
