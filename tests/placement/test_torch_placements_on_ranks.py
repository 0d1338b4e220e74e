"""torch's placement objects, its private strided shard included, and what `fully_shard` returns, on ranks."""

from __future__ import annotations

import pytest

from shardwright.layout import same_regions
from shardwright.placement import Interleaved, Ragged, Shard, ZigZag
from tests.placement import torch_programs as programs


def test_torchs_placements_are_accepted_everywhere(ranks):
    ranks(6, programs.torchs_placements_everywhere)


def test_a_strided_shard_of_seven_rows_is_not_the_order_tp_dp(ranks):
    strided, tp_first = ranks(6, programs.strided_shards_of_seven_rows)[0]
    assert strided.placements == (Interleaved(0, 2), Shard(0))
    assert tp_first.placements == (Shard(0), Shard(0))
    assert tp_first.order_names == ("tp", "dp")
    assert not same_regions(strided, tp_first)


@pytest.mark.parametrize(
    ("rows", "placement", "text"),
    [
        (12, Shard(0), "f32[12@(tp, dp), 2]"),
        (7, Shard(0), "f32[7@(tp, dp), 2]"),
        (7, ZigZag(0), "f32[7@dp, 2] {tp: ZigZag(0)} order(tp, dp)"),
        (7, Ragged((1, 3)), "f32[7@dp, 2] {tp: Ragged((1, 3), (0,))} order(tp, dp)"),
    ],
)
def test_what_fully_shard_returns_converts_without_communication(ranks, rows, placement, text):
    assert ranks(6, programs.fully_sharded, rows, placement)[0] == text
