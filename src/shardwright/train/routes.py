"""Where the tokens of a step went: kept over the micro-batches of a step."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.moe.layer import MoELayer


class Routes:
    """Hears the forwards with gradients of the mixtures of experts on this rank, by layer.

    Args: forwards: of a step, its last ones; a pipeline that learns its borders runs others before, on zeros.
    """

    def __init__(self, model: nn.Module, forwards: int) -> None:
        self._heard: dict[int, deque[tuple[Tensor, Tensor]]] = {}
        for name, module in model.named_modules():
            if isinstance(module, MoELayer):
                layer = next(int(part) for part in name.split(".") if part.isdigit())
                self._heard[layer] = deque(maxlen=forwards)
                module.register_forward_hook(self._hears(layer))

    def begin(self) -> None:
        """Forget the step before."""
        for heard in self._heard.values():
            heard.clear()

    def choices(self) -> dict[int, Tensor]:
        """Layer -> the experts of this rank's tokens, in the order of reading: int64 [tokens, k]."""
        found = {layer: [choices for choices, _ in heard] for layer, heard in self._heard.items()}
        return {layer: torch.cat(parts) for layer, parts in found.items() if parts}

    def counts(self, layers: int, experts: int, device: torch.device) -> Tensor:
        """Tokens of this rank: float64 [layers, experts], zeros for the layers of other stages."""
        found = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        for layer, heard in self._heard.items():
            for _, counted in heard:
                found[layer] += counted
        return found

    def _hears(self, layer: int) -> Any:
        def heard(module: MoELayer, *_: Any) -> None:
            if torch.is_grad_enabled():
                self._heard[layer].append((module.choices, module.tokens_per_expert.double()))

        return heard
