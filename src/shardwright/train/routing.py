"""Where two runs sent the same token to different experts, and how close the decision was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RoutingDifferences:
    """How many tokens went elsewhere in one layer, and the largest gap in score between the two decisions."""

    layer: int
    tokens: int
    gap: float

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.tokens} tokens, gap at most {self.gap:.3g}"


def routing_differences(scores: Sequence[Tensor], choices: Sequence[Tensor]) -> list[RoutingDifferences]:
    """Compare what `choices` [t, k] picked with the best of `scores` [t, experts], layer by layer.

    The order of a token's experts does not matter. The gap of a token is the k-th best score minus the worst
    one that was picked: tiny where rounding decided.
    """
    pairs = enumerate(zip(scores, choices, strict=True))
    found = [_compare(layer, scored, picked) for layer, (scored, picked) in pairs]
    return [difference for difference in found if difference.tokens]


def largest_gap(differences: Sequence[RoutingDifferences]) -> float:
    """The least close decision of all; 0 if there is none."""
    return max((difference.gap for difference in differences), default=0.0)


def _compare(layer: int, scores: Tensor, choices: Tensor) -> RoutingDifferences:
    choices = choices.to(scores.device)
    ranked, experts = scores.sort(dim=-1, descending=True, stable=True)
    top_k = choices.shape[1]
    differs = (experts[:, :top_k].sort(-1).values != choices.sort(-1).values).any(-1)
    gaps = (ranked[:, top_k - 1] - scores.gather(1, choices).amin(-1))[differs]
    return RoutingDifferences(layer, len(gaps), float(gaps.max()) if len(gaps) else 0.0)
