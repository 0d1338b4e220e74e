"""The meshes, placements and tensors on which plans are checked; new placements join here."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
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

MESHES = ((4,), (2, 2), (2, 3))
SHAPES = ((8, 6), (7, 3), (0, 5), (5,))


def mesh_shape(sizes: tuple[int, ...]) -> MeshShape:
    return MeshShape([f"a{i}" for i in range(len(sizes))], sizes)


def core_kinds(ndim: int) -> list[Placement]:
    kinds = [Replicate(), Shard(0), Partial(), Interleaved(0, 2)]
    return kinds + ([Shard(1)] if ndim > 1 else [])


def all_kinds(ndim: int, n: int) -> list[Placement]:
    kinds = [
        *core_kinds(ndim),
        ZigZag(0),
        Owner(n - 1),
        BlockCyclic(0, 1),
        Ragged((*range(n - 1), 2), (0,)),
        Partial("max"),
        Partial("avg"),
        Partial("product"),
    ]
    return kinds + ([Ragged((1,) * n, (0, 1)), Interleaved(1, 2)] if ndim > 1 else [])


def random_pairs(sizes: tuple[int, ...], count: int, seed: int) -> Iterator[tuple[Layout, Layout]]:
    """Pairs of layouts of all kinds, in random orders of application, some stored column by column."""
    draw = random.Random(seed)
    for _ in range(count):
        shape = draw.choice(SHAPES)
        stride = draw.choice([None, (1, max(shape[0], 1)) if len(shape) == 2 else None])
        yield tuple(_random_layout(draw, sizes, shape, stride) for _ in range(2))


def _random_layout(draw, sizes, shape, stride) -> Layout:
    mesh = mesh_shape(sizes)
    placements = [draw.choice(all_kinds(len(shape), n)) for n in sizes]
    order = draw.sample(mesh.axes, len(sizes))
    return Layout(mesh, placements, shape, dtype=torch.float64, stride=stride, order=order)


def small_integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values whose sums, products and averages over a few ranks are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)
