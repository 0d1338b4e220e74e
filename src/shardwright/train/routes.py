"""Where the tokens of a step went: kept over the micro-batches of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.moe.layer import MoELayer


class Routes:
    """Hears every forward with gradients of the mixtures of experts on this rank, by layer."""

    def __init__(self, model: nn.Module) -> None:
        self._choices: dict[int, list[Tensor]] = {}
        self._counts: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, MoELayer):
                layer = next(int(part) for part in name.split(".") if part.isdigit())
                self._choices[layer] = []
                module.register_forward_hook(self._hears(layer))

    def begin(self) -> None:
        """Forget the step before."""
        for layer in self._choices:
            self._choices[layer] = []
        self._counts.clear()

    def choices(self) -> dict[int, Tensor]:
        """Layer -> the experts of this rank's tokens, in the order of reading: int64 [tokens, k]."""
        return {layer: torch.cat(parts) for layer, parts in self._choices.items() if parts}

    def counts(self, layers: int, experts: int, device: torch.device) -> Tensor:
        """Tokens of this rank: float64 [layers, experts], zeros for the layers of other stages."""
        found = torch.zeros(layers, experts, dtype=torch.float64, device=device)
        for layer, counted in self._counts.items():
            found[layer] = counted
        return found

    def _hears(self, layer: int) -> Any:
        def heard(module: MoELayer, *_: Any) -> None:
            if torch.is_grad_enabled():
                self._choices[layer].append(module.choices)
                counted = module.tokens_per_expert.double()
                self._counts[layer] = self._counts[layer] + counted if layer in self._counts else counted

        return heard
