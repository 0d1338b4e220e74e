"""Seeded draws of meshes, shapes, values and layouts for the full run of the laws.

Plain `random`, not hypothesis: nothing is minimised here, and a hundred thousand draws cost seconds. The same
placements as in `tests.generators`, and every `Partial` that has a meaning for the drawn value.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import (
    BlockCyclic,
    Flat,
    Fused,
    Imaged,
    Interleaved,
    Joint,
    Moved,
    Nested,
    Owner,
    Partial,
    Partition,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Sliced,
    Spread,
    Together,
    ZigZag,
)
from tests.generators import AXES, MESH_SIZES

MESHES = tuple(MeshShape(AXES[: len(sizes)], sizes) for sizes in MESH_SIZES)
# Dims 0 and 1, primes, and axes larger than the dim.
SHAPES = (
    (), (0,), (1,), (2,), (3,), (7,), (12,), (13,), (0, 3), (1, 1), (1, 5), (2, 3), (3, 0), (5, 7), (8, 6),
    (13, 4), (2, 3, 5), (1, 7, 2), (3, 1, 0), (4, 6, 2),
)  # fmt: skip
REDUCTIONS = ("sum", "avg", "max", "min", "product", "norm2", "band", "bor", "bxor")
# Mostly floats of one width; whoever is exact for one is exact for the others.
_DTYPES = (torch.float32,) * 6 + (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)


@dataclass(frozen=True)
class Draw:
    """One tensor on one mesh."""

    mesh: MeshShape
    full: Tensor

    def layout(self, placements: Sequence[Placement], order: Sequence[str] | None = None) -> Layout:
        """The tensor under these placements."""
        shape = tuple(self.full.shape)
        return Layout(self.mesh, placements, shape, dtype=self.full.dtype, order=order)


def draw(rng: random.Random, mesh: MeshShape | None = None) -> Draw:
    """A mesh, a shape, a dtype and a value; every fourth value has no negative element."""
    return Draw(mesh or rng.choice(MESHES), value(rng, rng.choice(SHAPES), rng.choice(_DTYPES)))


def value(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Elements that differ; zeros are among them only for bools."""
    seeded = torch.Generator().manual_seed(rng.getrandbits(32))
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=seeded).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(-(2**40), 2**40, shape, generator=seeded)
    x = torch.randn(shape, generator=seeded, dtype=dtype)
    return x.abs() if rng.random() < 0.25 and not dtype.is_complex else x


def kinds(rng: random.Random, full: Tensor, n: int) -> list[Placement]:
    """One of every shipped placement that has a meaning for this tensor on an axis of size n."""
    found: list[Placement] = [Replicate(), Owner(rng.randrange(n))]
    found += [Partial(op) for op in REDUCTIONS if Partial(op).in_domain(full)]
    if full.dim():
        dim = rng.randrange(full.dim())
        found += [Shard(dim), Interleaved(dim, rng.randint(1, 4)), ZigZag(dim)]
        found += [BlockCyclic(dim, rng.randint(1, 3)), Ragged(_units(rng, n), (dim,))]
        found.append(Fused(dim, (2, 1, 1), rng.choice([None, _units(rng, n)])))
    if full.dim() > 1:
        group = sorted(rng.sample(range(full.dim()), rng.randint(2, full.dim())))
        found.append(Ragged(_units(rng, n), group))
    return found + (_made_by_views(rng, found, tuple(full.shape), n) if full.dim() else [])


def _made_by_views(
    rng: random.Random, plain: Sequence[Placement], shape: tuple[int, ...], n: int
) -> list[Placement]:
    """What views make of the partitions drawn so far: one of each class."""
    dim = rng.randrange(len(shape))
    size, cuts = shape[dim], [p for p in plain if isinstance(p, Partition)]
    lines = [Shard(0), Interleaved(0, rng.randint(1, 4)), ZigZag(0), Ragged(_units(rng, n)), Owner(n - 1)]
    start, step = rng.randint(0, 3), rng.randint(1, 3)
    of = start + max(size - 1, 0) * step + 1 + rng.randint(0, 3)
    outer = rng.choice([d for d in range(1, size + 1) if size % d == 0] or [1])
    dims = tuple(rng.sample(range(len(shape)), rng.randint(1, len(shape))))
    rows = ((-1,),) if rng.random() < 0.5 else ((1,),)
    base = (max(size - 1, 0),) if rows[0][0] < 0 else (0,)
    return [
        Flat(dims, rng.choice(lines)),
        Sliced(dim, rng.choice(lines), of, start, step, size),
        Spread(dim, rng.choice(lines), outer, size // outer, 1),
        Imaged(dim, rng.choice(lines), (size,), (size,), base, rows),
        Moved(dim, rng.choice(lines), 1, 0),
        Nested(((rng.choice(cuts), n), (Shard(dim), 1))),
        Joint(rng.choice(cuts), (n,), 0),
        Together(Ragged(_units(rng, 2 * n), rng.choice([(dim,), tuple(range(len(shape)))])), 2),
    ]


def _units(rng: random.Random, n: int) -> list[int]:
    units = [rng.randint(0, 3) for _ in range(n)]
    return units if any(units) else [1] * n


def sequence(rng: random.Random, drawn: Draw, first: Placement | None = None) -> Layout:
    """Random placements on every axis, in a random order of application; `first` on a random axis."""
    placements = [rng.choice(kinds(rng, drawn.full, n)) for n in drawn.mesh.sizes]
    if first is not None:
        fitting = [axis for axis, n in enumerate(drawn.mesh.sizes) if n == drawn.mesh.sizes[0]]
        placements[rng.choice(fitting)] = first
    return drawn.layout(placements, rng.sample(drawn.mesh.axes, len(drawn.mesh.axes)))


def tolerance(*layouts: Layout) -> int:
    """Units in the last place that the placements of these layouts declare together."""
    each = [getattr(p, "tolerance", 0) for layout in layouts for p in layout.placements]
    return sum(each)


def name_of(placement: Placement) -> str:
    """How the report counts a placement: its class, the reduction, and whether a group is flattened."""
    if isinstance(placement, Partial):
        return f"Partial({placement.reduce_op})"
    flat = isinstance(placement, Ragged) and len(placement.dims) > 1
    return f"{type(placement).__name__}{' of several dims' if flat else ''}"


def small(drawn: Draw) -> bool:
    """Whether a redistribution of it is worth its time."""
    return prod(drawn.full.shape) <= 60
