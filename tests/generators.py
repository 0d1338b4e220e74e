"""Hypothesis generators that every test of laws shares: meshes, shapes, placements, layouts.

A placement that is added to the library is added to `PARTITIONS` or `pendings` here, and is then tested
everywhere; a test asks that every exported one is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import cache
from math import prod
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Partition, Pending, Placement, Replicate
from shardwright.placement.block_cyclic import BlockCyclic
from shardwright.placement.fused import Fused
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.made_by_views.flat import Flat
from shardwright.placement.made_by_views.imaged import Imaged
from shardwright.placement.made_by_views.joint import Joint
from shardwright.placement.made_by_views.moved import Moved
from shardwright.placement.made_by_views.nested import Nested
from shardwright.placement.made_by_views.sliced import Sliced
from shardwright.placement.made_by_views.spread import Spread
from shardwright.placement.made_by_views.together import Together
from shardwright.placement.owner import Owner
from shardwright.placement.partial import Partial
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.placement.zigzag import ZigZag

# How often hypothesis tries each law; the full run is `make laws`, see `tests.laws`.
EXAMPLES = int(os.environ.get("SHARDWRIGHT_LAWS", "100"))
LAW = settings(max_examples=EXAMPLES, deadline=None)

MESH_SIZES = ((1,), (2,), (3,), (5,), (2, 2), (2, 3), (2, 2, 2))
DIM_SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13)
AXES = ("dp", "cp", "tp")


# A strategy looks at itself before it draws, which takes longer than to draw: each is made once.
@cache
def meshes(sizes: tuple[tuple[int, ...], ...] = MESH_SIZES) -> st.SearchStrategy[MeshShape]:
    """Meshes of one to three axes called dp, cp, tp."""
    return st.sampled_from(sizes).map(lambda chosen: MeshShape(AXES[: len(chosen)], chosen))


@cache
def shapes(min_dims: int = 0, max_dims: int = 3, max_numel: int = 400) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with dims 0, 1, primes, and larger and smaller than an axis."""
    sizes = st.lists(st.sampled_from(DIM_SIZES), min_size=min_dims, max_size=max_dims).map(tuple)
    return sizes.filter(lambda shape: prod(shape) <= max_numel)


Shape = tuple[int, ...]
Maker = Callable[[st.DrawFn, Shape, int], Partition]


@cache
def partitions(ndim: int, n: int, shape: Shape | None = None) -> st.SearchStrategy[Partition]:
    """Any exported partition of a tensor with `ndim` dims over an axis of size n.

    Args: shape: of the tensor, if it is known; those made by views then speak of tensors of this shape.
    """
    return _partitions(st.just(shape) if shape is not None else shapes(ndim, ndim, 10**6), n)


@cache
def _one_of(values: tuple[Hashable, ...]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@cache
def orders(values: tuple[Hashable, ...]) -> st.SearchStrategy[list[Any]]:
    """Of some values, all of them in any order."""
    return st.permutations(values)


@cache
def _numbers(low: int, high: int, least: int, most: int) -> st.SearchStrategy[list[int]]:
    """From `least` to `most` of them."""
    return st.lists(st.integers(low, high), min_size=least, max_size=most)


@cache
def _units(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Not all of them 0."""
    return _numbers(0, 3, least, most).filter(any)


@cache
def _units_if_any(n: int) -> st.SearchStrategy[list[int] | None]:
    return st.none() | _units(n, n)


@cache
def _some_dims(ndim: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, ndim - 1), min_size=1)


@st.composite
def _partitions(draw: st.DrawFn, shape: st.SearchStrategy[Shape], n: int) -> Partition:
    sizes = draw(shape)
    if not sizes:
        return Owner(draw(st.integers(0, n - 1)))
    kind = draw(_one_of((Shard, *PARTITIONS)))
    return PARTITIONS[kind](draw, sizes, n)


def of_one_dim(draw: st.DrawFn, length: int, n: int, *, simple: bool = False) -> Partition:
    """A partition of a 1-d tensor; at most one of those that are made of another is around it."""
    kinds = (Shard, Interleaved, ZigZag, BlockCyclic, Owner, Ragged)
    kind = draw(_one_of(kinds if simple else (*kinds, Sliced, Spread)))
    return PARTITIONS[kind](draw, (length,), n)


def _dim(draw: st.DrawFn, shape: Shape) -> int:
    return draw(st.integers(0, len(shape) - 1))


def _ragged(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    units = draw(_units(n, n))
    return Ragged(units, sorted(draw(_some_dims(len(shape)))))


def _fused(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    parts, units = draw(_units(1, 3)), draw(_units_if_any(n))
    return Fused(_dim(draw, shape), parts, units)


def _flat(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    dims = draw(orders(tuple(range(len(shape)))))[: draw(st.integers(1, len(shape)))]
    return Flat(tuple(dims), of_one_dim(draw, prod(shape[dim] for dim in dims), n))


def _sliced(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    dim = _dim(draw, shape)
    start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    of = start + max(shape[dim] - 1, 0) * step + 1 + draw(st.integers(0, 3))
    return Sliced(dim, of_one_dim(draw, of, n, simple=True), of, start, step, shape[dim])


def _spread(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    dim = _dim(draw, shape)
    outer, size, inner = _factors(draw, shape[dim], 3)
    return Spread(dim, of_one_dim(draw, size, n, simple=True), outer, size, inner)


def _imaged(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    """Of a reshape, or of steps of any width through a larger tensor."""
    dim = _dim(draw, shape)
    target = _factors(draw, shape[dim], 2)
    if draw(st.booleans()):
        source = _factors(draw, shape[dim], 2)
        return Imaged(dim, _simple(draw, source, n), target, source)
    base, steps = (tuple(draw(_numbers(low, 2, 2, 2))) for low in (0, 1))
    sizes = zip(base, steps, target, strict=True)
    source = tuple(first + step * max(size - 1, 0) + 1 for first, step, size in sizes)
    return Imaged(dim, _simple(draw, source, n), target, source, base, ((steps[0], 0), (0, steps[1])))


def _simple(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    kind = draw(_one_of((Shard, Interleaved, ZigZag, Owner, Ragged)))
    return PARTITIONS[kind](draw, shape, n)


def _nested(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    sizes = draw(orders((1, n, 1)))
    return Nested(tuple((_simple(draw, shape, size), size) for size in sizes[: 1 + sizes.index(n)]))


def _joint(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    """A group of one axis; those of two are drawn by `layouts`."""
    return Joint(_simple(draw, shape, n), (n,), 0)


def _together(draw: st.DrawFn, shape: Shape, n: int) -> Partition:
    each = draw(st.integers(1, 3))
    kind = draw(_one_of((Shard, Interleaved, ZigZag, Owner, Ragged, Flat, Fused)))
    return Together(PARTITIONS[kind](draw, shape, n * each), each)


def _factors(draw: st.DrawFn, size: int, count: int) -> Shape:
    """Numbers whose product is `size`."""
    left, found = size, []
    for _ in range(count - 1):
        found.append(draw(_one_of(tuple(d for d in range(1, left + 1) if left % d == 0) or (1,))))
        left //= found[-1]
    return tuple(draw(orders((*found, left))))


# Every exported partition, and how one is drawn for a tensor of a shape with a dim.
PARTITIONS: dict[type[Partition], Maker] = {
    Shard: lambda draw, shape, _: Shard(_dim(draw, shape)),
    Interleaved: lambda draw, shape, _: Interleaved(_dim(draw, shape), draw(st.integers(1, 4))),
    ZigZag: lambda draw, shape, _: ZigZag(_dim(draw, shape)),
    BlockCyclic: lambda draw, shape, _: BlockCyclic(_dim(draw, shape), draw(st.integers(1, 3))),
    Owner: lambda draw, _, n: Owner(draw(st.integers(0, n - 1))),
    Ragged: _ragged,
    Flat: _flat,
    Fused: _fused,
    Imaged: _imaged,
    Joint: _joint,
    Moved: lambda draw, shape, n: Moved(_dim(draw, shape), of_one_dim(draw, 5, n, simple=True), 1, 0),
    Nested: _nested,
    Sliced: _sliced,
    Spread: _spread,
    Together: _together,
}


@cache
def pendings(ops: tuple[str, ...] = ("sum", "max", "min", "product")) -> st.SearchStrategy[Pending]:
    """Shipped pendings; by default those whose `combine(embed(x))` is exact for every real value."""
    return st.sampled_from(ops).map(Partial)


@cache
def placements(ndim: int, n: int, shape: Shape | None = None) -> st.SearchStrategy[Placement]:
    """Any shipped placement; partitions most of the time."""
    part = partitions(ndim, n, shape)
    return st.one_of(part, part, part, pendings(), st.builds(Replicate))


@cache
@st.composite
def layouts(draw: st.DrawFn, *, pending: bool = True, dtype: torch.dtype = torch.float32) -> Layout:
    """Any layout of a small tensor, in any order of application."""
    mesh = draw(meshes())
    shape = draw(shapes())
    each = placements if pending else partitions
    chosen = [draw(each(len(shape), n, shape)) for n in mesh.sizes]
    if len(mesh.sizes) > 1 and shape and draw(st.integers(0, 3)) == 0:
        chosen[:2] = _group(draw, shape, mesh.sizes[:2])
    order = draw(orders(tuple(mesh.axes)))
    return Layout(mesh, chosen, shape, dtype=dtype, order=order)


def _group(draw: st.DrawFn, shape: Shape, sizes: tuple[int, ...]) -> list[Placement]:
    """Two axes that cut together."""
    partition: Partition = Nested(tuple((_simple(draw, shape, n), n) for n in sizes))
    if draw(st.booleans()):  # no cut of one axis, cut again by the other
        kind = draw(_one_of((Ragged, Fused, Flat, Owner)))
        partition = PARTITIONS[kind](draw, shape, sizes[0] * sizes[1])
    return [Joint(partition, sizes, index) for index in range(2)]


def numbered(layout: Layout) -> torch.Tensor:
    """A tensor of the layout's shape and dtype whose elements are all different."""
    return torch.arange(1, layout.numel + 1).to(layout.dtype).reshape(layout.shape)


def distributed(layout: Layout, full: torch.Tensor) -> list[torch.Tensor]:
    """The local tensors of all ranks."""
    return [layout.split(full, layout.coords_of(rank)) for rank in layout.ranks]
