"""Optimizer and learning rate of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from shardwright.train.config import TrainConfig

Kind = Literal["adamw", "sgd"]

# AdamW divides by sqrt(v) + eps. With the usual 1e-8, an element whose whole gradient is rounding noise takes
# a full-size step of either sign, and runs on different meshes part; 1e-6 is above the noise, and far below
# gradients.
EPS = 1e-6
BETAS = (0.9, 0.95)
LOWEST_SHARE = 0.1
SGD_RATE = 0.1


def make_optimizer(model: nn.Module, config: TrainConfig, kind: Kind = "adamw") -> Optimizer:
    """AdamW (or plain SGD) over all parameters, with weight decay on matrices only.

    The two groups are the same for every mesh, so that a checkpoint's groups fit any of them.
    """
    groups = _groups(model.parameters(), config.weight_decay if kind == "adamw" else 0.0)
    if kind == "sgd":
        return SGD(groups, lr=SGD_RATE, foreach=True)
    return AdamW(groups, lr=config.lr, betas=BETAS, eps=EPS, foreach=True)


def set_learning_rate(optimizer: Optimizer, config: TrainConfig, step: int, kind: Kind = "adamw") -> float:
    """Give every group the rate of this step (counted from 1) and return it."""
    peak = config.lr if kind == "adamw" else SGD_RATE
    rate = peak * schedule(step, config.warmup, config.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def schedule(step: int, warmup: int, steps: int) -> float:
    """Share of the peak rate at `step`: a linear rise over `warmup` times half a cosine down to a tenth."""
    rise = min(1.0, step / warmup) if warmup else 1.0
    fall = 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / max(steps, 1)))
    return rise * (LOWEST_SHARE + (1.0 - LOWEST_SHARE) * fall)


def _groups(parameters: Iterable[Tensor], decay: float) -> list[dict[str, Any]]:
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else vectors).append(parameter)
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
