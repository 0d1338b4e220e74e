"""Views of partitions are partitions of the same elements; the simplest placement says which."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter

import pytest
import torch

from shardwright.index.view import identity, permuted, reshaped, selected, sliced, unfolded
from shardwright.layout import Layout, MeshShape
from shardwright.placement import (
    BlockCyclic,
    Flat,
    Fused,
    Interleaved,
    Joint,
    Owner,
    Ragged,
    Shard,
    Sliced,
    ZigZag,
)
from shardwright.plan.decide import plan_redistribution
from shardwright.views.through import through
from tests.views.laws import check_view, numbered, run


def test_every_element_stays_where_it_is_under_chains_of_views():
    counts = run(seed=5, cases=150)
    assert counts["Joint"] > 5
    assert counts["copied"] > 5
    assert counts["aliased"] > 50 * counts["copied"]


def test_a_flattening_that_one_coord_has_stays_one_where_another_axis_cuts_what_is_flat():
    layout = Layout(SQUARE, [Flat((0, 1), Owner(1)), Fused(1, (2, 1, 1), None)], (4, 1), dtype=torch.int64)
    check_view(layout, reshaped((4, 1), (4, 1)), numbered((4, 1)), Counter())


LINE = MeshShape(("tp",), (2,))
SQUARE = MeshShape(("dp", "tp"), (2, 2))


def _on(mesh, placements, shape, view):
    layout = Layout(mesh, placements, shape, dtype=torch.float32)
    return through(layout, view, torch.float32, None)


NAMED = [
    ("a chunk of a fused weight", [Interleaved(0, 3)], (48, 5), sliced((48, 5), 0, 16, 1, 16), Shard(0)),
    ("a chunk of an uneven fused weight", [Interleaved(0, 3)], (21,), sliced((21,), 0, 7, 1, 7), Shard(0)),
    ("one row", [Shard(0)], (8, 5), selected((8, 5), 0, 5), Owner(1)),
    ("the front of a zigzag", [ZigZag(0)], (8,), sliced((8,), 0, 0, 1, 4), Shard(0)),
    ("whole rounds of blocks", [BlockCyclic(0, 2)], (16,), sliced((16,), 0, 4, 1, 8), BlockCyclic(0, 2)),
    ("columns, flattened", [Shard(1)], (6, 4), reshaped((6, 4), (24,)), Interleaved(0, 6)),
    ("uneven rows, flattened", [Shard(0)], (5, 7), reshaped((5, 7), (35,)), Ragged((3, 2), (0,))),
    ("back to columns", [Interleaved(0, 6)], (24,), reshaped((24,), (6, 4)), Shard(1)),
    ("windows that a rank has whole", [Shard(0)], (8,), unfolded((8,), 0, 2, 2), Shard(0)),
    ("another dim", [Shard(0)], (8, 6), sliced((8, 6), 1, 1, 2, 2), Shard(0)),
    ("a transpose", [ZigZag(0)], (8, 6), permuted((8, 6), (1, 0)), ZigZag(1)),
    ("rows of a group", [Ragged((1, 1), (0, 1))], (3, 5), identity((3, 5)), Ragged((1, 1), (0, 1))),
    ("a flat cut as a matrix", [Shard(0)], (14,), reshaped((14,), (2, 7)), Shard(0)),
    ("a flat cut that rows tear", [Shard(0)], (15,), reshaped((15,), (3, 5)), Flat((0, 1), Shard(0))),
]


@pytest.mark.parametrize(("what", "placements", "shape", "view", "wanted"), NAMED, ids=[n[0] for n in NAMED])
def test_the_result_is_the_simplest_placement(what, placements, shape, view, wanted):
    assert _on(LINE, placements, shape, view).placements == (wanted,), what


def test_a_slice_without_a_name_remembers_its_source():
    mesh = MeshShape(("tp",), (100,))
    new = _on(mesh, [Shard(0)], (1000,), sliced((1000,), 0, 7, 1, 800))
    assert new.placements == (Sliced(0, Shard(0), 1000, 7, 1, 800),)
    assert new.local_shape((0,)) == (3,)
    assert new.local_shape((80,)) == (7,)
    assert new.local_shape((81,)) == (0,)


def test_axes_that_cannot_say_alone_what_they_hold_say_it_together():
    layout = Layout(SQUARE, [Shard(0), Shard(0)], (48,), dtype=torch.float32)
    part = through(layout, sliced((48,), 0, 16, 1, 16), torch.float32, None)
    assert all(isinstance(p, Joint) for p in part.placements)
    assert [part.local_shape((a, b)) for a in (0, 1) for b in (0, 1)] == [(0,), (8,), (8,), (0,)]
    assert Layout.parse(str(part), SQUARE) == part
    assert pickle.loads(pickle.dumps(part)) == part
    assert part.with_placements({"dp": Shard(0)}).placements == (Shard(0), Shard(0))


def test_plans_from_a_view_state_the_least_that_can_move():
    layout = Layout(SQUARE, [Shard(0), Shard(0)], (48, 3), dtype=torch.float32)
    part = through(layout, sliced((48, 3), 0, 16, 1, 16), torch.float32, None)
    plan = plan_redistribution(part, part.with_placements([Shard(0), Shard(0)]))
    assert plan.total_bytes == plan.lower_bound == 2 * 4 * 3 * 4
    whole = plan_redistribution(part, part.with_placements([Shard(1), Shard(0)]))
    assert whole.total_bytes == whole.lower_bound


def _late(layout, view, dtype, stride):
    """A planted fault: slices begin one index later."""
    sizes = zip(view.base, view.target, view.source, strict=True)
    base = tuple(start + (size < full) for start, size, full in sizes)
    return through(layout, dataclasses.replace(view, base=base), dtype, stride)


def test_a_slice_that_begins_too_late_goes_red():
    layout = Layout(LINE, [Shard(0)], (9,), dtype=torch.int64)
    view = sliced((9,), 0, 3, 1, 4)
    seen = numbered((9,))[3:7]
    check_view(layout, view, seen, Counter())
    with pytest.raises(AssertionError):
        check_view(layout, view, seen, Counter(), see=_late)


def test_a_group_of_dims_in_another_order_keeps_it_through_a_reshape():
    layout = Layout(LINE, [Flat((1, 0), Shard(0))], (2, 3), dtype=torch.int64)
    seen = numbered((2, 3)).unsqueeze(2)
    new = check_view(layout, reshaped((2, 3), (2, 3, 1)), seen, Counter())
    assert new.placements == layout.placements
