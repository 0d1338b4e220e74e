"""Runs and boxes against explicit lists of indices."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.errors import PlacementError
from shardwright.index.region import Box, Region, flat_boxes
from shardwright.index.runs import Run, compose, interval, intervals, merged, total
from tests.generators import LAW


def indices(runs):
    return [i for offset, size in intervals(runs) for i in range(offset, offset + size)]


def plain(runs):
    """The same without the code under test."""
    return [r.offset + k * r.stride + i for r in runs for k in range(r.repeat) for i in range(r.size)]


@st.composite
def run_lists(draw, length):
    """Runs inside `[0, length)`, overlapping or not, in any order."""
    out = []
    for _ in range(draw(st.integers(0, 3))):
        offset = draw(st.integers(0, max(length - 1, 0)))
        size = draw(st.integers(0, min(4, length - offset)))
        stride = draw(st.integers(max(size, 1), 7))
        most = 1 + (length - offset - size) // stride
        out.append(Run(offset, size, stride, draw(st.integers(0, min(most, 6)))))
    return tuple(out)


@LAW
@given(run_lists(40))
def test_merging_keeps_the_indices_and_their_order(runs):
    assert indices(runs) == plain(runs) == plain(merged(runs))
    assert total(runs) == len(plain(runs))
    assert all(run.total for run in merged(runs))


@LAW
@given(st.data())
def test_composing_is_indexing(data):
    outer = merged(data.draw(run_lists(60)))
    held = plain(outer)
    assume(held)
    inner = merged(data.draw(run_lists(len(held))))
    assert plain(compose(outer, inner)) == [held[i] for i in plain(inner)]


def test_composing_periods_that_fit_stays_one_run():
    outer = (Run(5, 4, 16, 1_000_000),)
    assert compose(outer, (Run(4, 2, 8, 400_000),)) == (Run(21, 2, 32, 400_000),)
    assert compose(outer, interval(2, 3_999_999)) == (
        Run(7, 2, 2, 1),
        Run(21, 4, 16, 999_998),
        Run(15_999_989, 3, 3, 1),
    )


@LAW
@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
def test_a_flat_interval_is_a_few_boxes(shape, data):
    numel = prod(shape)
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    x = torch.arange(numel).reshape(shape)
    boxes = flat_boxes(shape, low, high)
    assert [i for box in boxes for i in x[box.slices].flatten().tolist()] == list(range(low, high))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_flat_interval_outside_is_refused():
    with pytest.raises(PlacementError, match="not inside a tensor of shape"):
        flat_boxes((2, 2), 0, 5)


@LAW
@given(st.data())
def test_a_product_of_runs_is_its_boxes(data):
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple))
    runs = tuple(merged(data.draw(run_lists(size))) for size in shape)
    region = Region.from_runs(runs)
    x = torch.arange(prod(shape)).reshape(shape)
    wanted = x
    for dim, of_dim in enumerate(runs):
        wanted = wanted.index_select(dim, torch.tensor(plain(of_dim), dtype=torch.int64))
    assert region.local_shape == tuple(wanted.shape)
    held = [i for box in region.boxes for i in x[box.slices].flatten().tolist()]
    assert held == wanted.flatten().tolist()
    assert region == Region(region.boxes, region.local_shape)


def test_a_region_is_a_value():
    region = Region([Box((0, 0), (2, 1)), Box((0, 1), (0, 1))], [2, 1])
    assert region.boxes == (Box((0, 0), (2, 1)),)
    assert region.bounding_box == Box((0, 0), (2, 1))
    assert region == Region([Box((0, 0), (2, 1))], (2, 1))
    assert hash(region) == hash(Region([Box((0, 0), (2, 1))], (2, 1)))
    assert region != Region([], (0, 1))
    assert Region([], (0, 1)).bounding_box is None
    assert region.boxes[0].slices == (slice(0, 2), slice(0, 1))
