"""`trace()` sees what torch's `fully_shard` sends under `parallelize_fsdp`, byte for byte."""

from __future__ import annotations

import torch
from torch import nn

import shardwright as sw
from shardwright.parallel import parallelize_fsdp
from shardwright.testing import rank_mesh

_WORLD, _WIDTH = 2, 8
_ELEMENTS = _WIDTH * _WIDTH  # of one weight


def _step() -> list[tuple[str, str, int]]:
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2)))
    mesh = rank_mesh((_WORLD,), ("shard",))
    for layer in model:
        parallelize_fsdp(layer, mesh)
    parallelize_fsdp(model, mesh)
    with sw.trace() as t:
        model(torch.ones(3, _WIDTH)).sum().backward()
    return [(c.op, c.axis, c.bytes_sent) for c in t.collectives]


def test_gathers_of_parameters_and_the_sum_of_gradients_are_rows_of_the_trace(ranks):
    # A gather sends the own part to each peer, a sum all but the own part: the same number on 2 ranks.
    sent = 4 * _ELEMENTS * (_WORLD - 1) // _WORLD
    for rows in ranks(_WORLD, _step):
        assert set(rows) == {("all_gather", "shard", sent), ("all_to_all", "shard", sent)}
        gathers = [row for row in rows if row[0] == "all_gather"]
        assert len(gathers) == 4  # each layer once forward, once backward
        assert len(rows) - len(gathers) == 2
