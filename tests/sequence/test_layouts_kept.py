"""What a model does around attention leaves the sequence cut as it was, and sends nothing."""

import torch
from torch import nn

import shardwright as sw
from shardwright.parallel import parallelize_context
from shardwright.testing import rank_mesh
from tests.models.configs import BY_NAME, batch_of


def _kept():
    line = rank_mesh((2,), ("cp",))
    x = sw.distribute_tensor(torch.randn(2, 12, 8), line, [sw.ZigZag(1)])
    layer = sw.distribute_module(nn.Linear(8, 16), line)
    made = layer(x)
    heads = made.view(2, 12, 4, 4).transpose(1, 2)
    empty = torch.tensor([])
    with sw.spmd(line, check=False), sw.trace() as t:
        joined = torch.cat([empty, heads], dim=-2)
        (made + x.repeat(1, 1, 2)).sum().backward()
    return made.placements, heads.placements, joined.placements, t.bytes


def test_rows_that_are_merged_and_taken_apart_keep_the_cut_of_the_sequence(ranks):
    """A linear layer merges [batch, sequence] into rows; a cache joins its empty start with the keys."""
    assert ranks(2, _kept) == [((sw.ZigZag(1),), (sw.ZigZag(2),), (sw.ZigZag(2),), 0)] * 2


def _sent_by_a_model():
    line = rank_mesh((2,), ("cp",))
    architecture = BY_NAME["llama"]
    batch = batch_of(architecture, 2, 64)
    model = parallelize_context(architecture.build(), line, attention="ring")
    model(**batch)  # the first call compares what the ranks were given
    with sw.trace() as t:
        model(**batch).loss.backward()
    return [(e.op, e.reason.split(":")[0], e.bytes_sent) for e in t.collectives]


def test_only_the_attention_of_a_model_sends(ranks):
    """Two layers; 32 of 64 keys and values of 2 heads, 4 wide, in 2 rows; gradients stay to be summed."""
    part = 2 * 2 * 32 * 2 * 4 * 4
    forward = ("send_recv", "scaled_dot_product_attention", part)
    backward = ("send_recv", "gradient of scaled_dot_product_attention", part)
    assert ranks(2, _sent_by_a_model) == [[forward] * 2 + [backward] * 4] * 2
