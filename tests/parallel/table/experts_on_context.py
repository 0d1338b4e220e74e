"""A decoder of our own with attention and experts, on one device and on ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright.moe import MoELayer

DIM, VOCAB, LENGTH = 8, 20, 9


class Block(nn.Module):
    def __init__(self, shared: bool, scored: bool):
        super().__init__()
        self.scored = scored
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.moe = MoELayer(DIM, 12, 4, 2, shared_expert_dim=12 if shared else None)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.mix(self.norm(x)).chunk(3, -1))
        x = x + self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )
        if not self.scored:
            return x + self.moe(x)
        scores = functional.linear(x, self.moe.router.weight)  # as a loss of the router has it
        return x + self.moe(x) + 0.1 * scores.logsumexp(-1, keepdim=True)


class Decoder(nn.Module):
    """Sum of the losses of the next tokens."""

    def __init__(self, shared: bool = True, recompute: bool = False, scored: bool = True):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(shared, scored) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        self.recompute = recompute

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return functional.cross_entropy(
            self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )


def made(**kwargs):
    torch.manual_seed(3)
    return Decoder(**kwargs)


def batch(rows=4):
    return torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
