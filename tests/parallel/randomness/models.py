"""A model that drops on rows, on tokens and on merged rows of both."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.inner, self.outer = dropout(0.3), dropout(0.5)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.mix(self.norm(x)).chunk(3, -1))
        x = x + self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )
        merged = self.down(self.inner(functional.gelu(self.up(x))))
        return x + self.outer(merged)


class Model(nn.Module):
    """Sum over all tokens of a loss."""

    def __init__(self, dropout=nn.Dropout, recompute=False):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.drop = dropout(0.25)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(8, 20)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.drop(self.embed(tokens))
        for block in self.layers:
            again = self.recompute == "reentrant"
            x = checkpoint(block, x, use_reentrant=again) if self.recompute else block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten(), reduction="sum")


def made(**kwargs):
    torch.manual_seed(3)
    return Model(**kwargs)


def batch(rows):
    return torch.randint(20, (rows, 7), generator=torch.Generator().manual_seed(0))
