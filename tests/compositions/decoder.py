"""A residual decoder of our own: norms, attention, a gated MLP or experts, a head that is tied or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright.moe import MoELayer

VOCAB, DIM, HEADS, KV_HEADS, HIDDEN, EXPERTS = 30, 16, 4, 2, 24, 4


class Attention(nn.Module):
    """Causal attention with groups of heads."""

    def __init__(self) -> None:
        super().__init__()
        size = DIM // HEADS
        self.q = nn.Linear(DIM, HEADS * size, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * size, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * size, bias=False)
        self.o = nn.Linear(HEADS * size, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, DIM] -> the same."""
        q, k, v = (self._heads(part(x)) for part in (self.q, self.k, self.v))
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(-1, -2) * (DIM // HEADS) ** -0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        mixed = weights @ v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        size = DIM // HEADS
        return x.view(*x.shape[:2], x.shape[2] // size, size).transpose(1, 2)


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, HIDDEN, bias=bias)
        self.up = nn.Linear(DIM, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., DIM] -> the same."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, *, experts: bool, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(DIM)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(DIM) if bias else nn.RMSNorm(DIM)
        self.mlp: nn.Module = (
            MoELayer(DIM, HIDDEN, EXPERTS, 2, shared_expert_dim=12) if experts else GatedMLP(bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, DIM] -> the same."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens to logits.

    Args:
        experts: a mixture of experts in place of the gated MLP.
        bias: biases in the MLP, and a layer norm before it.
        tied: the head's weight is the embedding's.
    """

    def __init__(self, *, experts: bool = False, bias: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.gain = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block(experts=experts, bias=bias) for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing: str = ""

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, tokens] -> [rows, tokens, VOCAB]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self._through(block, x)
        out: Tensor = self.head(self.norm(x)) * self.gain
        return out

    def _through(self, block: nn.Module, x: Tensor) -> Tensor:
        out: Tensor
        if self.checkpointing:
            out = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        else:
            out = block(x)
        return out


class ExpertStack(nn.Module):
    """A model whose only trainable parameters are those of its MoE layers; `tied` changes nothing."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.dense = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(MoELayer(DIM, HIDDEN, EXPERTS, 2) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        for frozen in (self.embedding, self.dense, self.head):
            frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, tokens] -> [rows, tokens, VOCAB]."""
        x = self.dense(self.embedding(tokens))
        for layer in self.layers:
            x = x + layer(functional.layer_norm(x, (DIM,)))
        out: Tensor = self.head(x)
        return out
