"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import ConfigError, refuse_other_kind
from shardwright.moe.grouped_linear import refuse_no_rows, refuse_no_sizes, refuse_other_dtype


class Routing(NamedTuple):
    """The decision for T tokens: mixing weights and expert numbers, each [T, top_k], best expert first."""

    weights: Tensor
    choices: Tensor


class TopKRouter(nn.Module):
    """Score every expert for every token and keep the best `top_k`.

    scores = softmax(x W^T) in at least float32;  (weights, choices) = top-k of scores;
    with `normalize`, weights are divided by their sum, so that they add to one.

    Equal scores: the expert with the lower number wins, on every device (`torch.topk` promises no order).
    The choice has no gradient; the weights have the gradient of softmax, top-k and normalisation.

    Args:
        dim: length of a token.
        num_experts: number of experts over all ranks.
        top_k: experts per token.
        normalize: whether the kept weights are divided by their sum.
    """

    def __init__(self, dim: int, num_experts: int, top_k: int, *, normalize: bool = True) -> None:
        super().__init__()
        refuse_no_sizes(dim=dim, num_experts=num_experts, top_k=top_k)
        refuse_other_kind("normalize", normalize, bool, ConfigError, fix="True or False")
        if top_k > num_experts:
            raise ConfigError(
                f"top_k={top_k} of {num_experts} experts has no meaning; choose 1 <= top_k <= num_experts"
            )
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew: normal, standard deviation 1/sqrt(dim)."""
        nn.init.normal_(self.weight, std=self.dim**-0.5)

    def forward(self, tokens: Tensor) -> Routing:
        """Return weights (in the dtype of the scores) and choices (int64):  [T, dim] -> [T, top_k] each."""
        refuse_no_rows("TopKRouter", tokens, self.dim)
        refuse_other_dtype(tokens, self.weight)
        logits = functional.linear(tokens, self.weight)
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        ranked, experts = scores.sort(dim=-1, descending=True, stable=True)
        weights, choices = ranked[:, : self.top_k], experts[:, : self.top_k]
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(weights, choices)

    def extra_repr(self) -> str:
        """Return the sizes, for `print(module)`."""
        return f"dim={self.dim}, num_experts={self.num_experts}, top_k={self.top_k}"
