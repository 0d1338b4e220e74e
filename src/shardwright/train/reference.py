"""The mixture of experts as anybody would write it first: every expert is a dense network, one after another.

It is what `--verify` trains on one device, so it shares no code with `shardwright.moe`, only the parameters'
names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.train.model import Decoder, ModelShape


class DenseExperts(nn.Module):
    """The weights of all experts: gate and up [experts, hidden, inner], down [experts, inner, hidden]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = _Weight(shape.experts, shape.hidden, shape.expert_hidden)
        self.up = _Weight(shape.experts, shape.hidden, shape.expert_hidden)
        self.down = _Weight(shape.experts, shape.expert_hidden, shape.hidden)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """What one expert makes of x:  [t, hidden] -> [t, hidden]."""
        gate, up, down = self.gate.weight[expert], self.up.weight[expert], self.down.weight[expert]
        return (functional.silu(x @ gate) * (x @ up)) @ down


class ReferenceMoE(nn.Module):
    """Top-k mixture of dense experts:  [b, s, h] -> [b, s, h].

    `choices` keeps the experts of the last call:  [t, k].
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = DenseExperts(shape)
        self.choices: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        best, self.choices = scores.topk(self.top_k, dim=-1)
        weights = best / best.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(scores.shape[-1]):
            token, slot = (self.choices == expert).nonzero(as_tuple=True)
            mixed = self.experts(tokens[token], expert) * weights[token, slot, None]
            out = out.index_add(0, token, mixed.to(out.dtype))
        return out.view_as(x)


class _Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


def reference_model(shape: ModelShape) -> Decoder:
    """A decoder of this shape with reference experts, on one device, its weights not yet set."""
    return Decoder(shape, ReferenceMoE)
