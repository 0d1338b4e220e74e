"""Whole tensors of a distributed model, brought together on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.comm.collectives import all_gather_uneven
from shardwright.context.domains import FLAT_DOMAIN
from shardwright.train.data import share

if TYPE_CHECKING:
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
    sizes = []
    for rank in range(world.size()):
        reader, tp_coord = divmod(rank, config.tp)
        rows = len(share(config.batch_size, config.batch_ranks, reader)) if tp_coord == 0 else 0
        sizes.append(rows * config.seq_len)
    mine = sizes[world.rank()]
    return [
        all_gather_uneven(choices[:mine], sizes, world, axis="world", reason="routing decisions")
        for choices in trainer.choices
    ]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _whole(model: nn.Module, choose: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: _full(choose(parameter)).clone() for name, parameter in model.named_parameters()}


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
