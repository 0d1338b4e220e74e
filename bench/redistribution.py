"""Redistributions beside torch's, on 4 gloo ranks: time, and bytes against the least that could be sent."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs

import shardwright as sw
from bench.paired import HEADER, Comparison, compare
from shardwright.testing import RankPool, rank_mesh

_RANKS = 4
_SHAPE = (1024, 256)
_MOVES = {
    "Shard(0) -> Replicate": (("Shard", 0), ("Replicate",)),
    "Shard(0) -> Shard(1)": (("Shard", 0), ("Shard", 1)),
    "Replicate -> Shard(0)": (("Replicate",), ("Shard", 0)),
    "Partial -> Replicate": (("Partial",), ("Replicate",)),
    "Partial -> Shard(0)": (("Partial",), ("Shard", 0)),
}


def run() -> None:
    """Print one line per move."""
    print(f"{HEADER} {'bytes':>10} {'least':>10}")
    with RankPool() as pool:
        for name in _MOVES:
            rows = pool.run(_RANKS, _measure, name, timeout=300)
            comparison, moved, least = rows[0]
            print(f"{comparison.row()} {moved:>10} {least:>10}", flush=True)


def _measure(name: str) -> tuple[Comparison, int, int]:
    logging.disable(logging.WARNING)  # torch tells each rank that it has no all-to-all on CPU
    mesh = rank_mesh((_RANKS,), ("tp",))
    source, target = _MOVES[name]
    x = torch.randn(_SHAPE)
    ours = _made(sw, mesh, x, source)
    peer = _made(theirs, mesh, x, source)
    there, peer_there = _placement(sw, target), _placement(theirs, target)
    assert torch.allclose(
        ours.redistribute(mesh, [there]).to_local(), peer.redistribute(mesh, [peer_there]).to_local()
    )
    dist.barrier()
    result = compare(
        name,
        lambda: ours.redistribute(mesh, [there]),
        lambda: peer.redistribute(mesh, [peer_there]),
        calls=10,
        turns=15,
    )
    plan = sw.plan_redistribution(ours.layout, ours.layout.with_placements([there]))
    return result, plan.total_bytes, plan.lower_bound


def _made(library: object, mesh: object, x: torch.Tensor, placement: tuple[object, ...]) -> theirs.DTensor:
    """Make a DTensor; what is to be summed is made from its terms."""
    placed = _placement(library, placement)
    if placement[0] == "Partial":
        return library.DTensor.from_local(x, mesh, [placed])  # type: ignore[attr-defined]
    return library.distribute_tensor(x, mesh, [placed])  # type: ignore[attr-defined]


def _placement(library: object, placement: tuple[object, ...]) -> object:
    name, *args = placement
    return getattr(library, str(name))(*args)
