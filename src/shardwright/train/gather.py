"""Whole tensors of a distributed model, brought together on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.comm.collectives import all_gather_uneven
from shardwright.comm.record import because
from shardwright.context.domains import FLAT_DOMAIN
from shardwright.parallel.pipeline.split import find_split
from shardwright.train.places import Place
from shardwright.train.step import Trainer


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, by name. Collective. Cost: gathers each parameter on each rank."""
    return _whole(model, lambda parameter: parameter.detach())


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient, whole and summed, by name; zeros where there is none. Collective."""
    return _whole(model, _gradient)


def gather_choices(trainer: Trainer) -> list[Tensor]:
    """The experts of each token of the last global batch, per layer:  int64 [tokens, k]. Collective."""
    config, world = trainer.config, trainer.context.mesh_for(FLAT_DOMAIN).get_group()
    places = [Place.of(config, rank) for rank in range(world.size())]
    tokens = [place.tokens() for place in places]
    found, mine = [], trainer.routes.choices()
    for layer in range(config.layers):
        stage = next(s for s in reversed(range(config.pp)) if config.layers * s // config.pp <= layer)
        counted = [place.counts and place.stage == stage for place in places]
        sizes = [len(held) if counts else 0 for held, counts in zip(tokens, counted, strict=True)]
        own = mine.get(layer, torch.zeros(0, config.top_k, dtype=torch.int64, device=trainer.context.device))
        parts = all_gather_uneven(
            own[: sizes[world.rank()]], sizes, world, axis="world", reason="routing decisions"
        )
        order = torch.cat([held for held, counts in zip(tokens, counted, strict=True) if counts])
        found.append(torch.empty_like(parts).index_copy_(0, order.to(parts.device), parts))
    return found


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _whole(model: nn.Module, choose: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    parts = {name: choose(parameter) for name, parameter in model.named_parameters()}
    mine = {n: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for n, x in parts.items()}
    merged: dict[str, Tensor] = {}
    for part in of_all_stages(model, mine):
        merged |= part
    return merged


T = TypeVar("T")


def of_all_stages(model: nn.Module, mine: T) -> list[T]:
    """What each stage of a pipeline has, first stage first; without one only `mine`. Collective, pickled."""
    split = find_split(model)
    if split is None or split.mesh.size() == 1:
        return [mine]
    everybody: list[Any] = [None] * split.mesh.size()
    with because("weights of all stages"):
        dist.all_gather_object(everybody, mine, group=split.mesh.get_group())
    return everybody
