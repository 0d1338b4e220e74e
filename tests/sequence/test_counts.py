"""Bytes, work and memory of context parallelism, counted by the profiler and the dispatcher."""

import pytest

import shardwright as sw
from shardwright.testing.rank_device import device_of_ranks

from .counted import bytes_sent, pairs_computed, peaks

pytestmark = pytest.mark.skipif(
    device_of_ranks() != "cpu", reason="counts gloo's calls and the CPU's kernels"
)


def test_a_ring_sends_n_minus_1_parts_of_keys_and_values(ranks):
    """32 keys of 2 heads and 8 features over 4 ranks: a part of keys and values is 1,024 B."""
    for forward, backward, recorded in ranks(4, bytes_sent, "ring", 32, 2):
        assert forward == [1024] * 3, "(n - 1)/n of keys and values"
        assert backward == [1024] * 6, "the same again, and as much of gradients"
        assert recorded == [3 * 1024, 6 * 1024]


def test_an_exchange_of_heads_sends_what_its_formula_says(ranks):
    """(n - 1)/n of queries, keys and values together, and of results, 1,024 B each on a rank; and back."""
    for forward, backward, recorded in ranks(4, bytes_sent, "all_to_all", 32, 4):
        assert forward == backward[::-1] == [3 * 1024 * 3 // 4, 1024 * 3 // 4]
        assert recorded == [3 * 1024, 3 * 1024]


@pytest.mark.parametrize("length", [1000, 1003])
def test_every_rank_computes_as_much_as_the_others(ranks, length):
    """Pairs of queries and keys in the kernels that ran, both passes; in all one device's."""
    work = ranks(4, pairs_computed, sw.ZigZag(2), length)
    mean = sum(work) / 4
    assert sum(work) == length * (length + 1)
    assert all(abs(each - mean) <= 0.05 * mean for each in work)


def test_a_window_computes_the_blocks_that_it_touches(ranks):
    """A plain cut of 1,000 over 4 ranks: a window of 4 touches its own part and the one before."""
    work = ranks(4, pairs_computed, sw.Shard(2), 1000, 4)
    assert work == [2 * 250 * 250, *[2 * 2 * 250 * 250] * 3]


@pytest.mark.slow
def test_the_peak_of_memory_falls_with_the_number_of_ranks(ranks):
    lengths = [256, 512, 1024, 2048]
    alone = ranks(1, peaks, lengths, "ring", timeout=170)[0]
    for n in (2, 4):
        for found in ranks(n, peaks, lengths, "ring", timeout=170):
            assert all(most <= 1.3 * one / n for most, one in zip(found, alone, strict=True)), (found, alone)
