"""Time to plan a redistribution: cold, with fresh shapes and nothing cached, and when the plan is known."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwright.layout import Layout, MeshShape
from shardwright.placement import (
    BlockCyclic,
    Interleaved,
    Owner,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    ZigZag,
)
from shardwright.plan import Plan, plan_redistribution
from shardwright.plan.work import Transfer

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
Placements = Sequence[Placement]
_TIMES = 9
Case = tuple[str, Placements, Placements, tuple[str, ...] | None]

_UNEVEN, _FLAT_DIMS = Ragged(range(8)), Ragged(range(8), (0, 1))
_FLAT: list[Case] = [
    ("(S0, S1) -> (S1, S0)", [S0, S1], [S1, S0], None),
    ("(S0, S0) -> (S1, S1)", [S0, S0], [S1, S1], None),
    ("(P, S0) -> (S0, R)", [P, S0], [S0, R], None),
    ("(ZigZag, Interleaved) -> (S1, Owner)", [ZigZag(0), Interleaved(0, 2)], [S1, Owner(1)], None),
]
_DEEP: list[Case] = [
    ("S0^4 -> S1^4", [S0] * 4, [S1] * 4, None),
    ("S0^4 -> S0^4, axes in reverse", [S0] * 4, [S0] * 4, ("d", "c", "b", "a")),
    ("Interleaved and Shard, dims swapped", [S0, Interleaved(0, 2), S1, S1], [S1, S1, S0, S0], None),
    ("BlockCyclic, ZigZag -> Ragged", [BlockCyclic(0, 3), ZigZag(0), S1, R], [S1, R, S0, _UNEVEN], None),
    ("two sums -> (R, R, S0, R)", [P, S0, P, S1], [R, R, S0, R], None),
    ("one sum -> (S1, R, S0, R)", [P, S0, R, S1], [S1, R, S0, R], None),
    ("a sum is made: S0^4 -> (R, P, S1, R)", [S0] * 4, [R, P, S1, R], None),
    ("Ragged of two dims", [_FLAT_DIMS, S0, R, R], [S1, R, S0, R], None),
]  # fmt: skip
_MESHES = (((8, 8), _FLAT), ((8, 8, 8, 8), _DEEP), ((16, 16, 8, 8), _DEEP))


def run() -> None:
    """Print one line per pair: milliseconds of this process, the median of many tensors of new shapes."""
    print("ms of this process. decide: steps, lower bound; bytes: total, max, peak, text; table: of one rank")
    print(f"{'':<44} {'ranks':>6} {'decide':>8} {'bytes':>8} {'table':>8} {'peers':>6} {'again, us':>10}")
    lengths = itertools.count(8192)  # every tensor is new: no plan and no table of its dims is known
    for sizes, cases in _MESHES:
        mesh = MeshShape(("a", "b", "c", "d")[: len(sizes)], sizes)
        for name, before, after, order in cases:
            pair = (_fit(before, sizes), _fit(after, sizes), order)
            times, peers = zip(*(_measured(mesh, *pair, lengths) for _ in range(_TIMES)), strict=True)
            decide, stated, table, again = (statistics.median(column) for column in zip(*times, strict=True))
            row = f"{decide * 1e3:>8.2f} {stated * 1e3:>8.2f} {table * 1e3:>8.2f} {peers[0]:>6}"
            print(f"{name:<44} {len(mesh.ranks):>6} {row} {again * 1e6:>10.2f}", flush=True)


def _measured(
    mesh: MeshShape,
    before: Placements,
    after: Placements,
    order: tuple[str, ...] | None,
    lengths: Iterator[int],
) -> tuple[tuple[float, float, float, float], int]:
    source = Layout(mesh, before, (next(lengths), next(lengths)), dtype=torch.float32)
    target = source.with_placements(after, order=order)
    decide, plan = _timed(lambda: plan_redistribution(source, target))
    stated, _ = _timed(lambda: (plan.total_bytes, plan.max_bytes, plan.peak_bytes, str(plan)))
    table, peers = _timed(lambda: _tables(plan))
    equal = source.with_placements(before), source.with_placements(after, order=order)
    again, _ = _timed(lambda: [plan_redistribution(*equal) for _ in range(1000)])
    return (decide, stated, table, again / 1000), peers


def _tables(plan: Plan) -> int:
    """The messages of one rank in every exchange; with how many others it may exchange something."""
    coords = tuple(size // 2 for size in plan.source.sizes)
    most = 0
    for step in plan.steps:
        work = step.work(coords)
        if isinstance(work, Transfer):
            most = max(most, len(work.shares) - 1)
    return most


def _fit(placements: Placements, sizes: tuple[int, ...]) -> Placements:
    """Ragged units for the axis they are on."""
    return [
        Ragged(range(n), p.dims) if isinstance(p, Ragged) else p
        for p, n in zip(placements, sizes, strict=True)
    ]


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result
