"""Which queries see which keys, as rectangles: nothing missed, nothing twice, few of them."""

import pytest
import torch

import shardwright as sw
from shardwright.layout import Layout, MeshShape
from shardwright.tensor.algorithms.cut_dim import find_cut
from shardwright.tensor.attention.blocks import Sees, causal_blocks

PLACEMENTS = [
    sw.ZigZag(0),
    sw.Shard(0),
    sw.BlockCyclic(0, 2),
    sw.Ragged((3, 0, 1, 2), (0,)),
    sw.Interleaved(0, 2),
]


def _parts(placement, length, n=4):
    cut = find_cut(Layout(MeshShape(("cp",), (n,)), [placement], (length,), dtype=torch.float32), 0)
    return cut.held


def _work(parts):
    """How many pairs of a query and a key each rank computes in a causal ring over these parts."""
    return [sum(block.pairs for keys in parts for block in causal_blocks(queries, keys)) for queries in parts]


def _seen(queries, keys):
    """Pairs that the blocks compute, by position; a block of positions is asked for each."""
    rows, columns = queries.positions().tolist(), keys.positions().tolist()
    found = []
    for block in causal_blocks(queries, keys):
        for i, row in enumerate(rows[block.queries]):
            for j, column in enumerate(columns[block.keys]):
                shown = {Sees.ALL: True, Sees.EARLIER: j <= i, Sees.SOME: column <= row}[block.sees]
                found += [(row, column)] if shown else []
    return found


@pytest.mark.parametrize("length", [1, 5, 13, 24])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_the_blocks_are_the_causal_pairs_each_once(placement, length):
    parts = _parts(placement, length)
    found = [pair for queries in parts for keys in parts for pair in _seen(queries, keys)]
    assert sorted(found) == [(row, column) for row in range(length) for column in range(row + 1)]


def test_queries_and_keys_that_are_cut_in_two_ways():
    found = [pair for q in _parts(sw.ZigZag(0), 13) for k in _parts(sw.Shard(0), 17) for pair in _seen(q, k)]
    assert sorted(found) == [(row, column) for row in range(13) for column in range(row + 1)]


@pytest.mark.parametrize(("n", "length"), [(2, 1024), (4, 4096), (8, 8192), (4, 4099), (3, 1000)])
def test_zigzag_gives_every_rank_the_same_work(n, length):
    """Within 5 % of the mean; a plain cut gives the last rank nearly twice the mean."""
    for placement, most in ((sw.ZigZag(0), 1.05), (sw.Shard(0), 2)):
        work = _work(_parts(placement, length, n))
        assert sum(work) == length * (length + 1) // 2
        assert max(work) <= most * sum(work) / n
    assert max(work) > 1.3 * sum(work) / n
    assert min(_work(_parts(sw.ZigZag(0), length, n))) >= 0.95 * sum(work) / n


def test_a_part_of_zigzag_is_one_kernel_call():
    parts = _parts(sw.ZigZag(0), 64)
    assert {len(causal_blocks(queries, keys)) for queries in parts for keys in parts} == {1}
