"""Hypothesis generators that every test of laws shares: meshes, shapes, placements, layouts.

A placement that is added to the library is added to `partitions` or `pendings` here, and is then tested
everywhere.
"""

from __future__ import annotations

import os
from math import prod

import torch
from hypothesis import settings
from hypothesis import strategies as st

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Partition, Pending, Placement, Replicate
from shardwright.placement.block_cyclic import BlockCyclic
from shardwright.placement.interleaved import Interleaved
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


def meshes(sizes: tuple[tuple[int, ...], ...] = MESH_SIZES) -> st.SearchStrategy[MeshShape]:
    """Meshes of one to three axes called dp, cp, tp."""
    return st.sampled_from(sizes).map(lambda chosen: MeshShape(AXES[: len(chosen)], chosen))


def shapes(min_dims: int = 0, max_dims: int = 3, max_numel: int = 400) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with dims 0, 1, primes, and larger and smaller than an axis."""
    sizes = st.lists(st.sampled_from(DIM_SIZES), min_size=min_dims, max_size=max_dims).map(tuple)
    return sizes.filter(lambda shape: prod(shape) <= max_numel)


@st.composite
def partitions(draw: st.DrawFn, ndim: int, n: int) -> Partition:
    """Any shipped partition of a tensor with `ndim` dims over an axis of size n."""
    if not ndim:
        return Owner(draw(st.integers(0, n - 1)))
    dim = draw(st.integers(0, ndim - 1))
    kind = draw(st.sampled_from(["shard", "shard", "interleaved", "zigzag", "cyclic", "owner", "ragged"]))
    if kind == "ragged":
        units = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n).filter(any))
        dims = draw(st.sets(st.integers(0, ndim - 1), min_size=1))
        return Ragged(units, sorted(dims))
    makers = {
        "shard": lambda: Shard(dim),
        "interleaved": lambda: Interleaved(dim, draw(st.integers(1, 4))),
        "zigzag": lambda: ZigZag(dim),
        "cyclic": lambda: BlockCyclic(dim, draw(st.integers(1, 3))),
        "owner": lambda: Owner(draw(st.integers(0, n - 1))),
    }
    return makers[kind]()


def pendings(ops: tuple[str, ...] = ("sum", "max", "min", "product")) -> st.SearchStrategy[Pending]:
    """Shipped pendings; by default those whose `combine(embed(x))` is exact for every real value."""
    return st.sampled_from(ops).map(Partial)


def placements(ndim: int, n: int) -> st.SearchStrategy[Placement]:
    """Any shipped placement; partitions most of the time."""
    part = partitions(ndim, n)
    return st.one_of(part, part, part, pendings(), st.builds(Replicate))


@st.composite
def layouts(draw: st.DrawFn, *, pending: bool = True, dtype: torch.dtype = torch.float32) -> Layout:
    """Any layout of a small tensor, in any order of application."""
    mesh = draw(meshes())
    shape = draw(shapes())
    each = placements if pending else partitions
    chosen = [draw(each(len(shape), n)) for n in mesh.sizes]
    order = draw(st.permutations(mesh.axes))
    return Layout(mesh, chosen, shape, dtype=dtype, order=order)


def numbered(layout: Layout) -> torch.Tensor:
    """A tensor of the layout's shape and dtype whose elements are all different."""
    return torch.arange(1, layout.numel + 1).to(layout.dtype).reshape(layout.shape)


def distributed(layout: Layout, full: torch.Tensor) -> list[torch.Tensor]:
    """The local tensors of all ranks."""
    return [layout.split(full, layout.coords_of(rank)) for rank in layout.ranks]
