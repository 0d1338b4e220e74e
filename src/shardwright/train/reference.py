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

    `scores` [t, experts] and `choices` [t, k] describe the last call. While `replay` is set, its experts [t,
    k] are used instead of the best ones: what another run decided, weighed by this one's scores.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = _Weight(shape.experts, shape.hidden)
        self.experts = DenseExperts(shape)
        self.replay: Tensor | None = None
        self.scores: Tensor | None = None
        self.choices: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        tokens = x.flatten(0, 1)
        scores = functional.linear(tokens, self.router.weight).softmax(-1)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        choices = best if self.replay is None else self.replay
        self.scores, self.choices = scores.detach(), best
        kept = scores.gather(1, choices)
        weights = kept / kept.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(scores.shape[-1]):
            token, slot = (choices == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.experts(tokens[token], expert) * weights[token, slot, None])
        return out.view_as(x)


class _Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


def reference_model(shape: ModelShape) -> Decoder:
    """A decoder of this shape with reference experts, on one device, its weights not yet set."""
    return Decoder(shape, ReferenceMoE)
