"""The byte law on a sample of the pairs that `python -m tests.plan.all_pairs` checks one and all."""

from __future__ import annotations

import random

import pytest
import torch

from shardwright.layout.layout import Layout
from shardwright.placement import Partial, Replicate, Shard
from shardwright.plan import decide, plan_redistribution
from shardwright.plan.holders import every_coords
from tests.plan.all_pairs import BrokenByteLawError, Holdings, Tally, all_layouts, check, check_all
from tests.plan.brute_force import least_elements
from tests.plan.kinds import mesh_shape


@pytest.fixture
def fresh_plans():
    decide._planned.cache_clear()
    yield
    decide._planned.cache_clear()


def sample(sizes, shape, count, seed=0) -> list[Layout]:
    layouts = all_layouts(sizes, shape)
    return random.Random(seed).sample(layouts, min(count, len(layouts)))


@pytest.mark.parametrize(
    ("sizes", "shape", "count", "run_every"),
    [
        ((4,), (1021, 1022), 8, 0),
        ((2, 3), (1021, 1022), 12, 0),
        ((2, 2, 2), (1024, 1024), 10, 0),
        ((4,), (7, 3), 8, 1),
        ((2, 2), (7, 3), 20, 4),
        ((2, 3), (0, 5), 10, 4),
        ((2, 2, 2), (7, 3), 16, 16),
    ],
)
def test_every_pair_of_a_sample_moves_the_least_in_two_rounds(sizes, shape, count, run_every):
    layouts = sample(sizes, shape, count)
    tally = check_all(layouts, range(len(layouts)), Holdings.of(layouts), run_every)
    assert sum(tally.pairs.values()) == len(layouts) ** 2


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 3), (2, 2, 2)])
def test_large_messages_have_the_right_values_and_move_the_least(monkeypatch, fresh_plans, sizes):
    monkeypatch.setattr(decide, "ONE_ROUND_BYTES", 0)
    layouts = sample(sizes, (8, 6), 14, seed=1)
    check_all(layouts, range(len(layouts)), Holdings.of(layouts), run_every=3)


def test_the_count_by_masks_is_the_count_element_by_element():
    for sizes in ((2, 2), (2, 3)):
        layouts = sample(sizes, (5, 2), 24)
        holdings = Holdings.of(layouts)
        for index, source in enumerate(layouts[:8]):
            for target, found in zip(layouts, holdings.least(index).tolist(), strict=True):
                if not target.pending_axes:
                    assert found == least_elements(source, target)


def test_a_pending_that_is_made_needs_each_element_once():
    mesh = mesh_shape((2, 2))
    rows = Layout(mesh, [Shard(0), Replicate()], (6, 4), dtype=torch.float32)
    plan = plan_redistribution(rows, rows.with_placements([Replicate(), Partial()]))
    assert plan.total_bytes == plan.lower_bound == 24 * 4  # every element goes to one rank that lacks it
    holdings = Holdings.of([rows, plan.target])
    assert holdings.least(0).tolist() == [0, 24]
    assert len(every_coords(mesh.sizes)) == 4


def test_a_plan_of_more_bytes_is_found(monkeypatch, fresh_plans):
    source, target = (
        Layout(mesh_shape((2, 2)), placements, (1024, 1024), dtype=torch.float32)
        for placements in ([Partial(), Shard(0)], [Replicate(), Replicate()])
    )
    least = Holdings.of([source, target]).least(0).tolist()[1]
    check(source, target, least, Tally())
    decide._planned.cache_clear()
    monkeypatch.setattr(decide, "ONE_ROUND_BYTES", 1 << 30)
    with pytest.raises(BrokenByteLawError, match="1 round"):
        check(source, target, least, Tally())


def test_a_wrong_bound_is_found():
    layouts = sample((2, 2), (7, 3), 6)
    with pytest.raises(BrokenByteLawError, match="the least is"):
        check(layouts[0], layouts[1], 1_000_000, Tally())
