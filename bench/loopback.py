"""Bytes that a network interface counts beside those that plans state: `python -m bench.loopback`.

Four gloo ranks run in a network namespace of their own, where nobody else uses the loopback interface. Its
counter in /proc/net/dev is read before and after a number of redistributions; what the same call counts with
no redistribution in it (the barriers around them, and torch's store) is subtracted. What is left beside the
payload is the framing of TCP and gloo: 66 bytes per segment of up to 64 KiB, and acknowledgements.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import track

import shardwright as sw
from bench.byte_table import kinds
from shardwright.comm.execute import execute
from shardwright.layout import MeshShape
from shardwright.testing import RankPool, rank_mesh

_TOLERANCE = 0.05
_RANKS = 4
_REPEATS = 6
_INSIDE = "SHARDWRIGHT_BENCH_NAMESPACE"
_ON_TWO_AXES = (
    "S0 S1 -> S1 S0",
    "S0 R -> R S0",
    "R S0 -> S0 S0",
    "P S0 -> S0 S0",
    "S0 P -> S1 S1",
    "P P -> R R",
    "P S0 -> S0 R",
    "S0 S1 -> R R",
    "Ragged S1 -> ZigZag Owner",
    "Interleaved Ragged -> R S0",
    "P ZigZag -> Owner R",
    "Owner P -> Interleaved S1",
)
_console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """One redistribution: bytes over all ranks that the plan states, and that the interface counted."""

    name: str
    planned: int
    counted: float
    tensor: int

    @property
    def agrees(self) -> bool:
        """Within the tolerance; where nothing is to be sent, less than that part of the tensor."""
        return abs(self.counted - self.planned) <= _TOLERANCE * (self.planned or self.tensor)

    def __str__(self) -> str:
        ratio = f"{self.counted / self.planned:.4f}" if self.planned else "-"
        mark = "" if self.agrees else "  DIFFERS"
        return f"{self.name:<28} {self.planned:>12,} {self.counted:>14,.0f} {ratio:>8}{mark}"


def namespace_refused() -> str:
    """Why this process may not make a network namespace; empty if it may."""
    if not shutil.which("unshare"):
        return "no `unshare` program (it belongs to util-linux)"
    tried = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else tried.stderr.strip() or "refused"


def _unshare() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def main(
    pair: Annotated[
        list[str] | None, typer.Option(help="Only this pair, as 'S0 Ragged -> R ZigZag'; may be repeated.")
    ] = None,
    side: Annotated[int, typer.Option(help="The tensor is float32 of side x side; 1024 are 4 MiB.")] = 1024,
) -> None:
    """Print planned and counted bytes; fail if they differ by more than 5 %."""
    code = run_alone_on_loopback("bench.loopback", sys.argv[1:])
    if code is not None:
        raise typer.Exit(code)
    rows = _counted(list(pair or _default_pairs()), side)
    differing = [row for row in rows if not row.agrees]
    worst = max((abs(row.counted / row.planned - 1) for row in rows if row.planned), default=0.0)
    _console.print(
        f"{len(rows)} pairs on 4 ranks, {side * side * 4:,} B each: {len(differing)} beyond "
        f"{_TOLERANCE:.0%}, the largest difference {worst:.2%}"
    )
    raise typer.Exit(int(bool(differing)))


def run_alone_on_loopback(module: str, arguments: Sequence[str]) -> int | None:
    """Run a module in a network namespace of its own, where nobody else uses the loopback interface.

    Returns: its exit code (2: no namespace can be made here); None: this process is in one, go on.
    """
    if _INSIDE in os.environ:
        _bring_up_loopback()
        return None
    refusal = namespace_refused()
    if refusal:
        _console.print(f"cannot make a network namespace: {refusal}")
        return 2
    command = [*_unshare(), sys.executable, "-m", module, *arguments]
    # Without a resolver in the namespace, c10d warns that it cannot name its peers.
    inside = {**os.environ, _INSIDE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, env=inside, check=False).returncode


def _default_pairs() -> list[str]:
    return [f"{a} -> {b}" for a, b in permutations(kinds(4), 2)] + list(_ON_TWO_AXES)


def _bring_up_loopback() -> None:
    """What `ip link set lo up` does."""
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, get_flags, request))[1]
        fcntl.ioctl(handle, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def _counted(pairs: list[str], side: int) -> list[Row]:
    _console.print(f"{'':<28} {'planned B':>12} {'interface B':>14} {'ratio':>8}")
    rows = []
    with RankPool() as pool:
        for text in track(pairs, "counting", console=_console, transient=True):
            pool.run(_RANKS, _redistribute, text, side, 1)  # connections are made, plans too
            idle = sent_by(partial(pool.run, _RANKS, _redistribute, text, side, 0))
            busy = sent_by(partial(pool.run, _RANKS, _redistribute, text, side, _REPEATS))
            rows.append(_row(text, side, (busy - idle) / _REPEATS))
            _console.print(str(rows[-1]))
    return rows


def _row(text: str, side: int, counted: float) -> Row:
    source, target = _layouts(text, side)
    return Row(text, sw.plan_redistribution(source, target).total_bytes, counted, side * side * 4)


def sent_by(program: Callable[[], object]) -> int:
    """What the interface sends while a program runs."""
    before = _interface_bytes()
    program()
    return _interface_bytes() - before


def _interface_bytes() -> int:
    """What the loopback interface has sent; it receives the same."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("no loopback interface in /proc/net/dev")


def _layouts(text: str, side: int) -> tuple[sw.Layout, sw.Layout]:
    """The two layouts that a pair names, over 4 ranks."""
    before, after = ([*half.split()] for half in text.split("->"))
    sizes = (4,) if len(before) == 1 else (2, 2)
    mesh = MeshShape(tuple(f"a{i}" for i in range(len(sizes))), sizes)
    source, target = (
        [kinds(n)[name] for name, n in zip(names, sizes, strict=True)] for names in (before, after)
    )
    layout = sw.Layout(mesh, source, (side, side), dtype=torch.float32)
    return layout, layout.with_placements(target)


def _redistribute(text: str, side: int, repeats: int) -> None:
    """Run a pair on this rank, between two barriers.

    Raises: AssertionError: a wrong result.
    """
    source, target = _layouts(text, side)
    mesh = rank_mesh(source.sizes, source.axes)
    coords = tuple(mesh.get_coordinate() or ())
    full = torch.arange(side * side, dtype=torch.float32).remainder_(97).view(side, side)
    local = source.split(full, coords).contiguous()
    plan = sw.plan_redistribution(source, target)
    dist.barrier()
    for _ in range(repeats):
        result = execute(plan, local, mesh)
    dist.barrier()
    if repeats and not target.pending_axes:
        assert torch.equal(result, target.split(full, coords)), text


if __name__ == "__main__":
    typer.run(main)
