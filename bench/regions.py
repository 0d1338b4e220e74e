"""Regions of one of 16,384 ranks: local shape, composing the placements of four axes, and the second time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

import torch

from shardwright.layout import Layout, MeshShape
from shardwright.layout.mesh_shape import Coords
from shardwright.placement import BlockCyclic, Interleaved, Owner, Placement, Ragged, Shard, ZigZag

_SHAPE = (1_000_003, 4096, 128)
_UNITS = (1, 2, 0, 3) * 4
_CASES: dict[str, list[Placement]] = {
    "Shard, four times one dim": [Shard(0)] * 4,
    "Shard, Interleaved, ZigZag, Shard": [Shard(0), Interleaved(0, 2), ZigZag(1), Shard(1)],
    "BlockCyclic, Shard, ZigZag, Owner": [BlockCyclic(0, 3), Shard(0), ZigZag(2), Owner(0)],
    "Ragged of one dim, then Shard": [Ragged(_UNITS), Shard(0), Shard(1), Shard(2)],
    "Ragged of two dims, then Shard": [Ragged(_UNITS, (0, 1)), Shard(0), Shard(2), Shard(2)],
    "Shard, then Ragged of two dims": [Shard(0), Shard(2), Shard(2), Ragged(_UNITS[:8], (0, 1))],
    "Ragged of two dims, twice": [Ragged(_UNITS, (0, 1)), Ragged(_UNITS, (1, 2)), Shard(2), Shard(2)],
}
_MESHES = {"16 ranks": (2, 2, 2, 2), "16,384 ranks": (16, 16, 8, 8)}


def run() -> None:
    """Print one line per case: microseconds of this process, the least of a few tries."""
    print(f"{'microseconds':<36} {'make':>7} {'shapes':>7} {'compose':>8} {'again':>7} {'on 16 ranks':>12}")
    for name, placements in _CASES.items():
        few, many = (_layout(placements, sizes) for sizes in _MESHES.values())
        coords = tuple(size // 2 for size in many.sizes)
        row = (
            _best(partial(_layout, placements, (16, 16, 8, 8))),
            _best(partial(many.shapes_along_order, coords)),
            _best(partial(_compose, many, coords)),
            _best(partial(many.region, coords)),
            _best(partial(_compose, few, (1, 1, 1, 1))),
        )
        print("{:<36} {:>7.1f} {:>7.1f} {:>8.1f} {:>7.2f} {:>12.1f}".format(name, *row), flush=True)


def _compose(layout: Layout, coords: Coords) -> object:
    """The region with its boxes, nothing remembered."""
    return layout._compose(coords).boxes


def _layout(placements: list[Placement], sizes: tuple[int, ...]) -> Layout:
    fitting = [
        Ragged(p.units[:n], p.dims) if isinstance(p, Ragged) else p
        for p, n in zip(placements, sizes, strict=True)
    ]
    return Layout(_mesh(sizes), fitting, _SHAPE, dtype=torch.float32)


@cache
def _mesh(sizes: tuple[int, ...]) -> MeshShape:
    return MeshShape(("a", "b", "c", "d"), sizes)


def _best(function: Callable[[], object], tries: int = 40, calls: int = 25) -> float:
    """Microseconds per call, of this process: neighbours on the machine do not count."""
    times = []
    for _ in range(tries):
        start = time.process_time()
        for _ in range(calls):
            function()
        times.append(time.process_time() - start)
    return min(times) / calls * 1e6
