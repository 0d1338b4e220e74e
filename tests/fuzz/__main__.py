"""`python -m tests.fuzz`: random programs on DTensors beside one device, on real ranks."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz.compiled import BACKENDS, prepared
from tests.fuzz.draw import MESHES, draw
from tests.fuzz.program import Program
from tests.fuzz.report import report
from tests.fuzz.sweep import Checked, Worlds
from tests.fuzz.verdicts import BAD
from tests.ops.modes import MODES

BATCH = 40


def main(arguments: list[str] | None = None) -> int:
    """Draw, run, minimise, report; 0 if nothing is wrong and undue errors are below one in a thousand."""
    options = _parser().parse_args(arguments)
    console = Console()
    meshes = [tuple(int(n) for n in text.split(",")) for text in options.mesh.split(";")]
    seeds = options.seeds or list(range(options.seed, options.seed + options.programs))
    start = time.monotonic()
    with Worlds(options.jobs, erased=options.erased) as worlds:
        found = _checked(worlds, seeds, meshes, console, options)
        text, good = report(found, time.monotonic() - start, worlds, minimise=options.minimise)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if options.report:
        Path(options.report).write_text(text + "\n")
    return 0 if good else 1


def batches(
    seeds: list[int], meshes: list[tuple[int, ...]], under: str, compiled: str
) -> list[list[Program]]:
    """Programs that run in one call: consecutive seeds of each mesh in turn, in a mode of torch, compiled."""
    dealt: dict[tuple[int, ...], list[Program]] = defaultdict(list)
    for seed in seeds:
        mesh = meshes[seed % len(meshes)]
        program = replace(draw(seed, mesh), under=under)
        dealt[mesh].append(prepared(program, compiled) if compiled else program)
    return [found[at : at + BATCH] for found in dealt.values() for at in range(0, len(found), BATCH)]


def _checked(
    worlds: Worlds,
    seeds: list[int],
    meshes: list[tuple[int, ...]],
    console: Console,
    options: argparse.Namespace,
) -> Checked:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found: Checked = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("programs", total=len(seeds))
        stride = 8 * BATCH * len(meshes)
        for at in range(0, len(seeds), stride):
            for checked in worlds.sweep(
                batches(seeds[at : at + stride], meshes, options.under, options.compiled)
            ):
                found += checked
                bad = sum(verdict.kind in BAD for _, verdict in found)
                progress.update(task, advance=len(checked), description=f"programs, {bad} failed")
                failed = [f"{program.seed}: {v.kind}" for program, v in checked if v.kind in BAD]
                if failed:
                    console.print("failed:", "; ".join(failed), highlight=False)
                if not console.is_terminal:
                    console.print(f"{len(found)} programs, {bad} failed")
                    console.file.flush()
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; program i has seed + i")
    parser.add_argument("--seeds", type=int, nargs="*", help="these programs alone")
    parser.add_argument("--mesh", default=";".join(",".join(map(str, m)) for m in MESHES))
    parser.add_argument("--jobs", type=int, default=1, help="worlds at a time")
    parser.add_argument("--erased", action="store_true", help="each program as an erased function")
    parser.add_argument("--compiled", choices=BACKENDS, default="", help="the steps as a compiled function")
    parser.add_argument("--under", choices=MODES, default="", help="a mode of torch that the steps run in")
    parser.add_argument("--minimise", type=int, default=8, help="how many classes of failures to minimise")
    parser.add_argument("--report", help="write the report to this file too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
