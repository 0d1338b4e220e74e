"""Bytes of every pair of placements over the least that could be sent: planned, nothing runs."""

from __future__ import annotations

from itertools import product

import torch
from rich.console import Console

import shardwright as sw
from shardwright.layout import MeshShape

_SHAPE = (1024, 1024)


def print_tables(meshes: list[tuple[int, ...]], console: Console) -> None:
    """One matrix of pairs per one-axis mesh, one line per larger mesh."""
    for sizes in meshes:
        if len(sizes) == 1:
            _matrix(sizes[0], console)
        else:
            _line(sizes, console)


def kinds(n: int) -> dict[str, object]:
    """The placements of the table for an axis of n ranks, by the names that it uses."""
    return {
        "R": sw.Replicate(),
        "S0": sw.Shard(0),
        "S1": sw.Shard(1),
        "P": sw.Partial(),
        "Interleaved": sw.Interleaved(0, 2),
        "Ragged": sw.Ragged(tuple(range(1, n + 1))),
        "Owner": sw.Owner(0),
        "ZigZag": sw.ZigZag(0),
    }


def _plan(sizes: tuple[int, ...], source: tuple[object, ...], target: tuple[object, ...]) -> sw.Plan:
    mesh = MeshShape(tuple(f"a{i}" for i in range(len(sizes))), sizes)
    layout = sw.Layout(mesh, source, _SHAPE, dtype=torch.float32)
    return sw.plan_redistribution(layout, layout.with_placements(target))


def _matrix(n: int, console: Console) -> None:
    known = kinds(n)
    console.print(
        f"\nplanned bytes over the lower bound on {n} ranks, f32{list(_SHAPE)} (from the row to the column)"
    )
    console.print(f"{'':<12}" + "".join(f"{name:>12}" for name in known))
    for name, source in known.items():
        cells = [_cell(_plan((n,), (source,), (target,))) for target in known.values()]
        console.print(f"{name:<12}" + "".join(f"{cell:>12}" for cell in cells))


def _cell(plan: sw.Plan) -> str:
    if plan.lower_bound:
        return f"{plan.total_bytes / plan.lower_bound:.2f}"
    return "-" if plan.total_bytes == 0 else "inf"


def _line(sizes: tuple[int, ...], console: Console) -> None:
    layouts = [tuple(chosen) for chosen in product(*(kinds(n).values() for n in sizes))]
    at_bound, more = 0, []
    for source, target in product(layouts, repeat=2):
        plan = _plan(sizes, source, target)
        if plan.total_bytes == plan.lower_bound:
            at_bound += 1
        else:
            more.append((plan.total_bytes / max(plan.lower_bound, 1), plan))
    ranks = " x ".join(map(str, sizes))
    console.print(f"{ranks} ranks: {at_bound} of {len(layouts) ** 2} pairs send exactly the lower bound")
    for ratio, plan in sorted(more, key=lambda item: -item[0])[:5]:
        console.print(f"  {ratio:.2f}: {plan.source} -> {plan.target}: {plan.reason}")
