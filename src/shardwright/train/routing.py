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

    The gap of a token is the k-th best score minus the worst one that was picked: zero where both agree,
    whatever their order, and tiny where rounding decided.
    """
    pairs = enumerate(zip(scores, choices, strict=True))
    found = [_compare(layer, scored, picked) for layer, (scored, picked) in pairs]
    return [difference for difference in found if difference.tokens]


def largest_gap(differences: Sequence[RoutingDifferences]) -> float:
    """The least close decision of all; 0 if there is none."""
    return max((difference.gap for difference in differences), default=0.0)


def _compare(layer: int, scores: Tensor, choices: Tensor) -> RoutingDifferences:
    choices = choices.to(scores.device)
    kth_best = scores.topk(choices.shape[1], dim=-1).values[:, -1]
    gaps = kth_best - scores.gather(1, choices).amin(-1)
    return RoutingDifferences(layer, int((gaps > 0).sum()), float(gaps.max()))
