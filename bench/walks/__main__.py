"""`python -m bench.walks`: how many functions and files a call walks through, beside torch's DTensor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import partial

from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

import bench.walks
from bench.walks import ceilings, source, tables
from bench.walks.ceilings import Numbers
from bench.walks.child import in_a_child
from bench.walks.counting import Count
from bench.walks.library import OURS, TORCHS, Library, world
from bench.walks.walk import WALKS, there

_WAYS_OUT = (
    "where the calls go: python -m bench.walks --lines --walk NAME\n"
    "where more is right: raise its ceiling in bench/walks/ceilings.toml, the reason in the commit"
)


def main(arguments: list[str] | None = None) -> int:
    """Count, print, and with `--check` compare; 0 unless a number is above its ceiling."""
    options = _parser().parse_args(arguments)
    console = Console(width=max(Console().width, 120), highlight=False, markup=False)
    mesh = world()
    names = options.walk or there()
    if options.lines:
        library = TORCHS if options.torch else OURS
        for name in names:
            console.print(tables.by_file(name, _counted(name, library, mesh)))
        return 0
    found = {**_numbers(names, OURS, mesh), "source": source.measure(OURS.folder)}
    peer = {} if options.ours else _numbers(names, TORCHS, mesh)
    console.print(tables.summary(found, peer, ceilings.read()))
    if options.lower:
        ceilings.write(ceilings.lowered(found, ceilings.read()))
    return _checked(found, console) if options.check else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.walks",
        description=bench.walks.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--walk", action="append", choices=WALKS, help="only this one; can be repeated")
    parser.add_argument("--check", action="store_true", help="fail if a number is above its stored ceiling")
    parser.add_argument("--lower", action="store_true", help="bring ceilings down to today's numbers")
    parser.add_argument("--lines", action="store_true", help="print the calls of each walk by file")
    parser.add_argument("--ours", action="store_true", help="leave torch's numbers out")
    parser.add_argument("--torch", action="store_true", help="with --lines: those of torch's DTensor")
    return parser


def _counted(name: str, library: Library, mesh: DeviceMesh) -> Count:
    return in_a_child(partial(WALKS[name].count, library, mesh))


def _numbers(names: Iterable[str], library: Library, mesh: DeviceMesh) -> Numbers:
    return {name: WALKS[name].kept(_counted(name, library, mesh)) for name in names}


def _checked(found: Numbers, console: Console) -> int:
    stored = ceilings.read()
    above = list(ceilings.above(found, stored))
    for line in above:
        console.print(f"TOO MUCH  {line}")
    if above:
        console.print(_WAYS_OUT)
    for line in ceilings.well_below(found, stored):
        console.print(f"can be lowered (--lower)  {line}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
