"""What a layout is: equality, order, cost, and what it refuses."""

from __future__ import annotations

import time

import pytest
import torch

from shardwright.errors import LayoutError, MeshError, PlacementError
from shardwright.layout import Layout, MeshShape
from shardwright.placement import BlockCyclic, Interleaved, Owner, Partial, Ragged, Replicate, Shard, ZigZag
from tests.generators import distributed, numbered
from tests.placement.user_placements import LogSumExp

MESH = MeshShape(("dp", "tp"), (3, 2))
BOOLS = torch.ones(3) > 0


def make(placements, shape, mesh=MESH, **kwargs):
    return Layout(mesh, placements, shape, dtype=kwargs.pop("dtype", torch.float32), **kwargs)


def test_order_matters_only_where_two_partitions_touch_one_dim():
    same = [Shard(0), Shard(0)]
    assert make(same, (7,)) != make(same, (7,), order=("tp", "dp"))
    assert make([Shard(0), Shard(1)], (7, 7)) == make([Shard(0), Shard(1)], (7, 7), order=("tp", "dp"))
    assert make([Shard(0), Partial()], (7,)) == make([Shard(0), Partial()], (7,), order=("tp", "dp"))
    pendings = [Partial("max"), Partial("min")]
    assert make(pendings, (7,)) != make(pendings, (7,), order=("tp", "dp"))
    sums = [Partial(), Partial()]
    assert make(sums, (7,)) == make(sums, (7,), order=("tp", "dp"))
    own = [LogSumExp(2), LogSumExp(2)]  # nobody said that it commutes with itself
    assert make(own, (7,)) != make(own, (7,), order=("tp", "dp"))


def test_the_strided_form_is_tp_first_only_where_sizes_divide():
    """7 rows on tp 2 and dp 3: Interleaved left to right is not the order tp, dp."""
    for rows, equal in ((7, False), (12, True)):
        strided = make([Interleaved(0, 2), Shard(0)], (rows,))
        ordered = make([Shard(0), Shard(0)], (rows,), order=("tp", "dp"))
        x = torch.arange(rows).float()
        same = [
            torch.equal(a, b) for a, b in zip(distributed(strided, x), distributed(ordered, x), strict=True)
        ]
        assert all(same) is equal
        assert strided != ordered  # equal regions, another layout


def test_tp_first_then_dp_gives_each_rank_a_piece_of_its_tp_piece():
    layout = make([Shard(0), Shard(0)], (7,), order=("tp", "dp"))
    assert [part.tolist() for part in distributed(layout, torch.arange(7))] == [
        [0, 1],
        [4],
        [2, 3],
        [5],
        [],
        [6],
    ]


def test_shard_of_a_flattened_dim_splits_the_flat_dim():
    """Ragged over (0, 1) leaves (1, length); Shard(0) after it splits the length, before it the rows."""
    after = make([Ragged((1, 1, 1), (0, 1)), Shard(0)], (3, 4))
    assert [part.tolist() for part in distributed(after, torch.arange(12).reshape(3, 4))] == [
        [[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8, 9]], [[10, 11]],
    ]  # fmt: skip
    before = make([Ragged((1, 1, 1), (0, 1)), Shard(0)], (3, 4), order=("tp", "dp"))
    assert before != after
    assert before.local_shape((0, 0)) == (1, 3)


def test_an_owner_of_a_scalar_leaves_the_others_with_no_elements():
    layout = make([Owner(1), Partial()], ())
    assert layout.local_shape((0, 0)) == (0,)
    assert layout.local_shape((1, 0)) == ()
    x = torch.tensor(3.0)
    assert layout.join(distributed(layout, x)) == 3


def test_local_strides_keep_the_order_of_the_logical_dims():
    layout = make([Shard(0), Replicate()], (6, 4), stride=(1, 6))
    assert layout.local_shape((0, 0)) == (2, 4)
    assert layout.local_stride((0, 0)) == (1, 2)
    assert make([Shard(0), Replicate()], (6, 4)).local_stride((0, 0)) == (4, 1)


def test_negative_dims_and_mappings_are_resolved():
    assert make([Shard(-1), Replicate()], (6, 4)) == make({"dp": Shard(1)}, (6, 4))
    assert make({"dp": Shard(-2)}, (6, 4)).placements == (Shard(0), Replicate())


def test_a_layout_is_not_torchs_layout():
    """torch's word of this name says how one memory stores a tensor: neither stands for the other."""
    layout = make({}, (3,))
    assert layout != torch.strided
    assert layout not in (torch.sparse_csr, torch.strided)
    assert layout != "f32[3]"


def test_a_layout_is_frozen():
    with pytest.raises(AttributeError, match=r"Layout.shape: layouts are frozen"):
        make({}, (3,)).shape = (4,)


def test_torchs_placements_are_accepted():
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    layout = make([_StridedShard(0, split_factor=2), TorchShard(0)], (12,))
    assert layout.placements == (Interleaved(0, 2), Shard(0))
    assert all(p.is_partition for p in layout.placements)
    assert make([TorchReplicate(), TorchReplicate()], ()).is_fully_replicated


def test_with_placements_changes_what_it_names():
    layout = make([Shard(0), Shard(0)], (7, 4), order=("tp", "dp"))
    changed = layout.with_placements({"tp": Replicate()})
    assert changed.placements == (Shard(0), Replicate())
    assert layout.with_placements({}) == layout
    assert layout.with_placements([Shard(0), Shard(0)]) == make([Shard(0), Shard(0)], (7, 4))
    assert layout.with_shape((9, 2)).order == layout.order


def test_pending_and_replicated_axes_are_named():
    layout = make([Partial(), Shard(0)], (4,))
    assert layout.pending_axes == (0,)
    assert not layout.is_fully_replicated
    assert layout.order_names == ("dp", "tp")
    assert layout.itemsize * layout.numel == 16
    assert layout.coords_of(5) == (2, 1)


def test_pendings_of_different_kinds_combine_right_to_left():
    layout = make([Partial("sum"), Partial("max")], (2,))
    terms = [torch.tensor([float(rank), 1.0]) for rank in range(6)]
    assert layout.join(terms).tolist() == [1.0 + 3.0 + 5.0, 3.0]
    swapped = make([Partial("sum"), Partial("max")], (2,), order=("tp", "dp"))
    assert swapped.join(terms).tolist() == [max(0 + 2 + 4, 1 + 3 + 5), 3.0]


@pytest.mark.parametrize(
    ("error", "message", "build"),
    [
        (PlacementError, r"Shard\(2\): dim 2 is out of range", lambda: make([Shard(2), Replicate()], (3, 4))),
        (PlacementError, r"the tensor has no dims", lambda: make([Shard(0), Replicate()], ())),
        (PlacementError, r"2 unit counts for an axis of size 3", lambda: make({"dp": Ragged((1, 2))}, (3,))),
        (PlacementError, r"not all zero", lambda: Ragged((0, 0))),
        (PlacementError, r"not negative", lambda: Ragged((1, -1))),
        (PlacementError, r"distinct and ascending", lambda: make({"dp": Ragged((1, 1, 1), (1, 0))}, (3, 3))),
        (PlacementError, r"Owner\(3\): the axis has coords 0 to 2", lambda: make({"dp": Owner(3)}, (3,))),
        (PlacementError, r"chunks must be an integer >= 1", lambda: Interleaved(0, 0)),
        (PlacementError, r"block must be an integer >= 1", lambda: BlockCyclic(0, 0)),
        (PlacementError, r"Partial\('mean'\): the reductions are sum", lambda: Partial("mean")),
        (PlacementError, r"no meaning for these values of torch.bool", lambda: Partial().embed(BOOLS, 2, 0)),
        (LayoutError, r"1 placements for a mesh with 2 axes \(dp, tp\)", lambda: make([Shard(0)], (3,))),
        (MeshError, r"no axis 'pp'; its axes are dp, tp", lambda: make({"pp": Shard(0)}, (3,))),
        (MeshError, r"no axis 'pp'", lambda: make([Shard(0), Shard(0)], (3,), order=("pp",))),
        (LayoutError, r"names an axis twice", lambda: make([Shard(0), Shard(0)], (3,), order=("tp", "tp"))),
        (LayoutError, r"stride \(1,\) does not fit", lambda: make([Shard(0), Shard(0)], (3, 4), stride=(1,))),
        (LayoutError, r"cannot be split as", lambda: make({}, (3,)).split(torch.zeros(4), (0, 0))),
        (LayoutError, r"2 local tensors for a mesh of 6 ranks", lambda: make({}, (3,)).join([BOOLS] * 2)),
        (MeshError, r"do not name the sizes", lambda: MeshShape(("a", "a"), (2, 2))),
        (MeshError, r"rank 6 is not in the mesh", lambda: make({}, (3,)).coords_of(6)),
    ],
)  # fmt: skip
def test_wrong_use_is_refused_early(error, message, build):
    with pytest.raises(error, match=message):
        build()


def best_of(function, repeat=5, number=50):
    """Seconds of this process, the least of a few tries: neighbours on the machine do not count."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        for _ in range(number):
            function()
        times.append(time.process_time() - start)
    return min(times)


def test_regions_of_one_of_16384_ranks_take_no_loop_over_ranks():
    placements = [Shard(0), Interleaved(0, 2), ZigZag(1), Shard(1)]
    few, many = (
        make(placements, (1_000_003, 4096), mesh=MeshShape(("a", "b", "c", "d"), sizes))
        for sizes in ((2, 2, 2, 2), (16, 16, 8, 8))
    )
    coords = many.coords_of(12_345)
    for made in ("_compose", "shapes_along_order"):
        small, large = getattr(few, made), getattr(many, made)
        # Nothing is remembered here: 1,024 times as many ranks cost the same.
        assert best_of(lambda large=large: large(coords)) < 5 * best_of(
            lambda small=small: small((1, 0, 1, 0))
        )
    assert many.local_shape(coords) is many.local_shape(coords)
    assert many.region(coords) is many.region(coords)


def test_a_region_of_a_hundred_million_blocks_is_a_few_runs():
    million = make([BlockCyclic(0, 3), Shard(0)], (10**9 + 7, 2))
    region = million.region((1, 1))
    assert sum(len(of_dim) for of_dim in region.runs) <= 4
    assert region.numel == 2 * million.local_shape((1, 1))[0]


def test_a_flat_group_before_a_cut_of_another_dim_costs_its_boxes_and_no_rows():
    layout = make([Ragged((1, 2, 3), (0, 1)), Shard(2)], (1000, 1001, 64))
    assert len(layout.region((1, 1)).boxes) <= 3
    assert best_of(lambda: layout._compose((1, 1)), number=5) < 0.05  # row by row: a second


def test_a_flat_group_and_pieces_of_another_dim_are_a_few_runs_and_no_rows():
    layout = make([Ragged((1, 2, 3), (0, 1)), Interleaved(2, 4)], (100_003, 1001, 64))
    assert best_of(lambda: layout._compose((1, 1)), number=5) < 0.01  # as boxes: a minute
    small = make([Ragged((1, 2, 3), (0, 1)), Interleaved(2, 4)], (5, 4, 12))
    region, x = small.region((1, 1)), numbered(small)
    held = torch.cat([x[box.slices].reshape(-1) for box in region.boxes])
    assert torch.equal(held.reshape(region.local_shape), small.split(x, (1, 1)))


def test_numbered_parts_of_a_layout_are_as_the_text_says():
    layout = make([ZigZag(0), Shard(1)], (12, 4))
    assert distributed(layout, numbered(layout))[0].tolist() == [[1, 2], [5, 6], [41, 42], [45, 46]]
