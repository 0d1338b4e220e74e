"""Programs that are erased, as one device writes them, and the same on distributed tensors."""

import copy

import torch
from torch import nn

import shardwright as sw
from shardwright.testing.meshes import rank_mesh


class Block(nn.Module):
    """A transformer block: attention, and a feed-forward layer of gelu."""

    def __init__(self, width=16, heads=4, p=0.0):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(b, s, d)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def block(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Block(**kwargs)


def batches(n, shape=(4, 6, 16)):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for _ in range(n)]


# How the weights of a block lie: everything whole and the batch cut, or Megatron's cuts.
PLACINGS = {
    "batch": ({}, {"tp": sw.Shard(0)}),
    "tensor": (
        {
            "up.weight": {"tp": sw.Shard(0)},
            "up.bias": {"tp": sw.Shard(0)},
            "down.weight": {"tp": sw.Shard(1)},
        },
        {"tp": sw.Replicate()},
    ),
}


def placed(module, placing, world):
    """A copy of the module on a mesh of all ranks, and how its batches are placed."""
    mesh = rank_mesh((world,), ("tp",))
    weights, of_batch = PLACINGS[placing]
    model = copy.deepcopy(module)
    sw.distribute_module(model, mesh, {**weights, "*": {"tp": sw.Replicate()}})
    return model, lambda x: sw.distribute_tensor(x, mesh, of_batch)


def full(x):
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def assert_equal(found, wanted, *, exact=False):
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(full(found).detach(), wanted.detach(), **tolerance)


def assert_replayed(fast, recordings, replays):
    report = fast.report()
    assert (report.recordings, report.replays) == (recordings, replays), str(report)
    assert not report.as_it_is, str(report)
