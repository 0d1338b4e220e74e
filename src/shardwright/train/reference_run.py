"""The same training steps on one device in plain torch."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from shardwright.train.config import TrainConfig
from shardwright.train.data import Corpus
from shardwright.train.model import Decoder, ModelShape, init_weights
from shardwright.train.optim import Kind, make_optimizer, set_learning_rate
from shardwright.train.reference import ReferenceMoE, reference_model


@dataclass(frozen=True)
class Gradients:
    """What a forward and backward pass gave: loss, gradients by name, scores [t, experts] per layer."""

    loss: float
    by_name: dict[str, Tensor]
    scores: list[Tensor]

    @property
    def norm(self) -> float:
        """The norm of all gradients as one vector, added up in float64."""
        return math.sqrt(sum(float(g.double().square().sum()) for g in self.by_name.values()))


class ReferenceRun:
    """A run of `config` on one device: no mesh, no shardwright tensor, experts one after another."""

    def __init__(self, config: TrainConfig, corpus: Corpus, kind: Kind, device: torch.device) -> None:
        self.config, self.corpus, self.kind, self.device = config, corpus, kind, device
        self.model = reference_model(ModelShape.of(config))
        init_weights(self.model, config.seed)
        self.model.to(device)
        self.optimizer = make_optimizer(self.model, config, kind)

    def weights(self) -> dict[str, Tensor]:
        """The parameters by name, not copied."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def gradients(self, step: int) -> Gradients:
        """Loss and gradients of `step` at this run's weights; they stay in `.grad` for `update`."""
        return self._pass(self.model, step)

    def gradients_at(
        self, step: int, weights: Mapping[str, Tensor], choices: Sequence[Tensor], dtype: torch.dtype
    ) -> Gradients:
        """Loss and gradients of `step` at other weights, in `dtype`, with experts that another run chose."""
        model = copy.deepcopy(self.model)
        model.load_state_dict({name: value.to(self.device) for name, value in weights.items()})
        model.zero_grad()
        for layer, replay in zip(_layers(model), choices, strict=True):
            layer.replay = replay.to(self.device)
        return self._pass(model.to(dtype), step)

    def go_on(self, weights: Mapping[str, Tensor], found: Gradients) -> None:
        """Take the next step from these weights with their gradients, and the optimizer's own state."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name])
            parameter.grad = found.by_name[name].to(parameter)

    def update(self, step: int) -> None:
        """Clip (as the run does: not under SGD) and take the optimizer's step."""
        if self.kind == "adamw":
            clip_grad_norm_(self.model.parameters(), self.config.clip)
        set_learning_rate(self.optimizer, self.config, step, self.kind)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _pass(self, model: Decoder, step: int) -> Gradients:
        config = self.config
        batch = self.corpus.batch(config.seed, step, range(config.batch_size), config.seq_len).to(self.device)
        with _threads_of_all(config.world or 1):
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        gradients = {name: _gradient(parameter) for name, parameter in model.named_parameters()}
        return Gradients(
            loss.item(), gradients, [torch.empty(0) if x.scores is None else x.scores for x in _layers(model)]
        )


@contextmanager
def _threads_of_all(ranks: int) -> Iterator[None]:
    """The others wait for the reference: it may have their cores."""
    own = torch.get_num_threads()
    torch.set_num_threads(max(own, min(ranks, os.cpu_count() or 1)))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _layers(model: Decoder) -> list[ReferenceMoE]:
    return [module for module in model.modules() if isinstance(module, ReferenceMoE)]
