"""Redistributions beside torch's, on 4 gloo ranks: bytes against the least that could be sent, and time."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from bench.byte_table import print_tables
from bench.moves import RankResult, measure
from bench.pairs import QUICK, Pair, pairs_of, parse
from shardwright.testing import RankPool

_WORST = 1.3
_MEAN = 0.45
_CALLS = {4: 3}  # short calls are repeated within a turn
_console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """One pair at one size: milliseconds of the slowest rank, and bytes over all ranks."""

    pair: Pair
    mib: int
    ours: float
    theirs: float
    planned: int
    sent_by_torch: int
    least: int
    exempt: bool

    @property
    def ratio(self) -> float:
        """Our time over torch's."""
        return self.ours / self.theirs

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.pair.sizes))
        mark = "  native" if self.exempt else "  SLOW" if self.slow else ""
        moved = f"{self._bytes(self.planned):>7} {self._bytes(self.sent_by_torch):>7}"
        times = f"{self.ours:>9.2f} {self.theirs:>9.2f} {self.ratio:>6.2f}"
        return f"{self.mib:>4} {mesh:>4}  {self.pair!s:<16} {moved} {times}{mark}"

    def _bytes(self, moved: int) -> str:
        if self.least:
            return f"{moved / self.least:.2f}"
        return "-" if moved == 0 else "inf"

    @property
    def slow(self) -> bool:
        """Slower than torch by more than is allowed, and not torch's own collective."""
        return self.ratio > _WORST and not self.exempt


_HEADER = " MiB mesh  pair               bytes   torch   ours ms  torch ms  ratio"


def run(arguments: list[str]) -> None:
    """Print the tables, and end the process: with 1 if a pair is too slow or the mean is."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_redistribution)
    app(arguments, prog_name="python -m bench redistribution")


def _redistribution(
    mesh: Annotated[
        list[str] | None, typer.Option(help="Sizes of a mesh, as 4 or 2,2; may be repeated. [default: both]")
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="MiB of a float32 tensor; may be repeated. [default: 4 and 64]")
    ] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="Only this pair, as 'S0 R -> R S0'; may be repeated.")
    ] = None,
    turns: Annotated[int, typer.Option(help="Turns of each program; the median counts.")] = 5,
    *,
    quick: Annotated[bool, typer.Option(help="A pair of every kind of plan, at 4 MiB.")] = False,
    tables: Annotated[bool, typer.Option(help="Also the bytes of placements that torch lacks.")] = True,
) -> None:
    """Print bytes and time of redistributions beside torch's, in turns on the same ranks."""
    meshes = [tuple(int(n) for n in text.split(",")) for text in mesh or ("4", "2,2")]
    chosen = [one for sizes in meshes for one in _chosen(sizes, pair or [], quick=quick)]
    if not chosen:
        raise typer.BadParameter(f"no pair has one placement per axis of {meshes}")
    rows = _timed(chosen, [4] if quick else size or [4, 64], turns)
    if tables:
        print_tables(meshes, _console)
    raise typer.Exit(_summary(rows))


def _chosen(sizes: tuple[int, ...], named: list[str], *, quick: bool) -> list[Pair]:
    if named:
        return [parse(text, sizes) for text in named if len(text.split("->")[0].split()) == len(sizes)]
    return [parse(text, sizes) for text in QUICK.get(sizes, ())] if quick else pairs_of(sizes)


def _timed(pairs: list[Pair], sizes: list[int], turns: int) -> list[Row]:
    _console.print(
        "bytes, torch: bytes sent by all ranks over the lower bound; - where nothing need be sent.\n"
        "ms: median over the turns of the slowest rank. native: one bare collective of the backend.\n"
    )
    _console.print(_HEADER)
    rows = []
    work = [(pair, mib) for mib in sizes for pair in pairs]
    with RankPool() as pool:
        for pair, mib in track(work, "timing", console=_console, transient=True):
            side = int((mib * 2**18) ** 0.5)
            found = pool.run(pair.ranks, measure, pair, (side, side), turns, _CALLS.get(mib, 1), timeout=300)
            rows.append(_row(pair, mib, found))
            _console.print(str(rows[-1]))
    return rows


def _row(pair: Pair, mib: int, found: list[RankResult]) -> Row:
    """Of every turn the slowest rank counts."""
    first = found[0]
    ours, theirs = (
        median(max(turn) for turn in zip(*times, strict=True)) * 1e3
        for times in ([one.ours for one in found], [one.theirs for one in found])
    )
    sent = round(sum(one.sent_by_torch for one in found))
    return Row(pair, mib, ours, theirs, first.planned, sent, first.least, first.is_bare_collective)


def _summary(rows: list[Row]) -> int:
    """Print the line that counts; 1 if it breaks what is promised."""
    mean = geometric_mean(row.ratio for row in rows)
    judged = [row for row in rows if not row.exempt]
    worst = max(judged, key=lambda row: row.ratio, default=None)
    for mib in sorted({row.mib for row in rows}):
        some = [row.ratio for row in rows if row.mib == mib]
        _console.print(f"{mib} MiB: geometric mean {geometric_mean(some):.2f} of {len(some)} pairs")
    _console.print(
        f"{len(rows)} rows: geometric mean {mean:.2f} of torch's time (at most {_MEAN}); worst "
        + (f"{worst.ratio:.2f} (at most {_WORST}): {worst.pair}, {worst.mib} MiB" if worst else "-")
        + f"; {len(rows) - len(judged)} exempt as bare native collectives"
    )
    return int(mean > _MEAN or any(row.slow for row in rows))
