"""FSDP over row-wise tensor parallelism: two ways to say it, kept apart where sizes do not divide."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.errors import LayoutError
from shardwright.layout import Layout, MeshShape, same_regions, to_strided
from shardwright.placement import Interleaved, Partial, Shard

MESH = MeshShape(("dp", "tp"), (3, 2))


def make(placements, shape, mesh=MESH, **kwargs):
    return Layout(mesh, placements, shape, dtype=torch.float32, **kwargs)


def test_an_order_has_a_strided_form_where_sizes_divide():
    ordered = make([Shard(0), Shard(0)], (12, 4), order=("tp", "dp"))
    strided = to_strided(ordered)
    assert strided.placements == (Interleaved(0, 2), Shard(0))
    assert strided.order == (0, 1)
    assert to_strided(strided) == strided
    assert make([_StridedShard(0, split_factor=2), Shard(0)], (12, 4)) == strided


def test_seven_rows_on_tp_2_and_dp_3_are_kept_apart():
    with pytest.raises(LayoutError, match="sizes do not divide"):
        to_strided(make([Shard(0), Shard(0)], (7, 4), order=("tp", "dp")))


def test_other_placements_stay_as_they_are():
    mesh = MeshShape(("dp", "cp", "tp"), (2, 2, 2))
    layout = make([Shard(1), Partial(), Shard(1)], (3, 8), mesh=mesh, order=("tp", "dp"))
    strided = to_strided(layout)
    assert strided.placements == (Interleaved(1, 2), Partial(), Shard(1))
    assert same_regions(layout, strided)


@pytest.mark.parametrize("order", list(permutations(("dp", "cp", "tp"))))
def test_every_order_of_three_axes_has_a_strided_form(order):
    mesh = MeshShape(("dp", "cp", "tp"), (2, 3, 2))
    layout = make([Shard(0)] * 3, (24,), mesh=mesh, order=order)
    strided = to_strided(layout)
    assert strided.order == (0, 1, 2)
    assert same_regions(layout, strided)


@pytest.mark.parametrize("rows", range(1, 30))
def test_conversion_succeeds_exactly_where_ranks_hold_the_same(rows):
    ordered = make([Shard(0), Shard(0)], (rows,), order=("tp", "dp"))
    strided = make([Interleaved(0, 2), Shard(0)], (rows,))
    if same_regions(ordered, strided):
        assert to_strided(ordered) == strided
    else:
        with pytest.raises(LayoutError):
            to_strided(ordered)
