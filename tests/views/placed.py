"""Tensors with placements, made and compared without communication: what the tests of views share."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.layout.arrangement import OrderedPlacements
from shardwright.testing.meshes import rank_mesh

MESHES = {2: ((2,), ("tp",)), 3: ((3,), ("tp",)), 4: ((2, 2), ("dp", "tp")), 6: ((2, 3), ("dp", "tp"))}


def mesh():
    """The mesh of this world."""
    return rank_mesh(*MESHES[dist.get_world_size()])


def place(x, placements, order):
    """The leaf of these placements, made without communication."""
    stride = tuple(x.stride())
    layout = sw.Layout(mesh(), placements, tuple(x.shape), dtype=x.dtype, stride=stride, order=order)
    local = layout.split(x, tuple(mesh().get_coordinate())).clone()
    given = OrderedPlacements(placements, order)
    return sw.DTensor.from_local(local, mesh(), given, shape=x.shape, stride=x.stride())


def compare(what, got, wanted):
    """This rank's part of a result is its part of the single-device result."""
    got, wanted = got.detach(), wanted.detach()
    if not isinstance(got, sw.DTensor):
        part, mine = wanted, got
    elif sw.layout_of(got).pending_axes:  # terms of a sum: gathered, by every rank alike
        part, mine = wanted, got.full_tensor()
    else:
        assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
        covers(sw.layout_of(got))
        part, mine = sw.layout_of(got).split(wanted, tuple(mesh().get_coordinate())), got.to_local()
    torch.testing.assert_close(mine, part, rtol=1e-6, atol=1e-6, msg=lambda m: f"{what}: {m}")


@lru_cache(maxsize=8192)
def covers(layout):
    """Every element is on a rank, and on one alone of an axis that cuts."""
    full = torch.arange(layout.numel).reshape(layout.shape)
    parts = [layout.split(full, layout.coords_of(rank)) for rank in layout.ranks]
    assert torch.equal(layout.join(parts), full), f"{layout} is no layout"
    copies = prod(n for n, p in zip(layout.sizes, layout.placements, strict=True) if not p.is_partition)
    assert sum(part.numel() for part in parts) == copies * full.numel(), f"{layout} has elements twice"
