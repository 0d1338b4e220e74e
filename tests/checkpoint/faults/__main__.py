"""Every fault on checkpoints, ours beside torch's; exit 1 if one is not survived.

python -m tests.checkpoint.faults [--flips 2000] [--kills 300] [--only "one rank" "object storage" ...]
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch

from shardwright.testing.pool import RankPool
from tests.checkpoint.faults import kills, objects, peer, ranks, sweep


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.checkpoint.faults")
    asked.add_argument("--flips", type=int, default=2000)
    asked.add_argument("--kills", type=int, default=300)
    asked.add_argument("--peer", type=int, default=200, help="flipped bits in a checkpoint of torch's")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--only", nargs="+", default=[""], help="families whose names begin so")
    given = asked.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = families(Path(name), given)
        bad = sum(told(what, make()) for what, make in found if what.startswith(tuple(given.only)))
        if given.peer and given.only == [""]:
            beside(Path(name) / "p", given)
    return 1 if bad else 0


def families(folder: Path, given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], sweep.Verdicts]]]:
    """What is tried; first what forks this process, which has no threads then."""
    yield "killed at random moments", lambda: kills.random_moments(folder / "k", given.kills, given.seed)
    yield "two writers", lambda: ranks.two_writers(folder / "w")
    yield "flipped bits", lambda: sweep.flips(folder / "flips", given.flips, given.seed)
    yield "files", lambda: sweep.files(folder / "files")
    for code, lasting, over in product((errno.EIO, errno.ENOSPC), (False, True), (False, True)):
        what = f"{errno.errorcode[code]}{', lasting' * lasting}{', over another' * over}"
        yield what, partial(sweep.errors, folder / "e", code, lasting=lasting, over=over)
    yield "EIO of a load", lambda: sweep.read_errors(folder / "r")
    yield "folders made to harm", lambda: sweep.hostile_folders(folder / "h")
    yield "not ours", lambda: chain(sweep.strangers(folder / "s"), sweep.beside(folder / "b"))
    for lasting, over in product((False, True), (False, True)):
        what = f"object storage{', lasting' * lasting}{', over another' * over}"
        yield what, partial(objects.errors, lasting=lasting, over=over)
    yield "object storage of a load", objects.read_errors
    yield "object storage, cut manifests", objects.cut_manifests
    yield "object storage, saves of others", objects.others
    yield "killed at each operation", partial(_on_ranks, ranks.kills, folder / "o")
    yield "disks of one node", partial(_on_ranks, ranks.own_disks, folder / "n")
    yield "one rank fails", partial(_on_ranks, ranks.failures, folder / "f")


def _on_ranks(family: Callable[..., sweep.Verdicts], folder: Path) -> Iterator[tuple[str, str]]:
    with RankPool(preload=("shardwright.checkpoint",)) as pool:
        yield from family(pool.run, folder)


def beside(folder: Path, given: argparse.Namespace) -> None:
    """The same of torch's distributed checkpoint, whose tracebacks are not shown."""
    with contextlib.redirect_stderr(io.StringIO()):
        found = {
            f"{given.peer} flipped bits": peer.flips(folder / "f", given.peer, given.seed),
            "EIO at each operation, over another": peer.errors(folder / "e"),
        }
    for what, counts in found.items():
        print(f"torch's DCP, {what}: {counts}")


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
