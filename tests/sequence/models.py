"""Unmodified models on sequences that are cut, beside one device: loss, logits, gradients, three steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.parallel import parallelize_context
from shardwright.testing.meshes import rank_mesh
from tests.models.check import compare
from tests.models.configs import BY_NAME, Architecture, batch_of

ROWS, STEPS = 2, 3
Found = dict[str, torch.Tensor | None]
Place = Callable[[nn.Module], object]


def train(model: nn.Module, batch: dict[str, Any], parameters: Callable[[], Iterator[Any]]) -> Found:
    """The loss, the logits and every gradient of the first step, the parameters after some steps of AdamW."""
    optimizer, found = torch.optim.AdamW(parameters(), lr=1e-2, eps=1e-4), Found()
    for step in range(STEPS):
        out = model(**batch)
        out.loss.backward()
        if step == 0:
            found |= {"loss": out.loss.detach(), "logits": out.logits.detach()}
            found |= {
                f"gradient of {n}": None if p.grad is None else p.grad.clone()
                for n, p in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"after steps: {n}": p.detach() for n, p in model.named_parameters()}
    return found


def whole(found: Found) -> Found:
    """Plain tensors."""
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}


def differing(
    architecture: Architecture, place: Place, length: int, batch: dict[str, Any] | None = None
) -> list[str]:
    """What is not one device's; the loss within 1e-5, all else within 1e-4 of the largest element."""
    warnings.simplefilter("ignore")
    batch = batch_of(architecture, ROWS, length) if batch is None else batch
    plain, model = architecture.build(), architecture.build()
    wanted = train(plain, batch, plain.parameters)
    place(model)
    found = whole(train(model, batch, model.parameters))
    loss = {"loss": found["loss"]}, {"loss": wanted["loss"]}
    return [*compare(found, wanted), *compare(*loss, tolerance=1e-5)]


def check(name: str, length: int = 13, attention: str = "auto", **options: Any) -> list[str]:
    """An architecture of the table over all ranks."""
    mesh = rank_mesh((torch.distributed.get_world_size(),), ("cp",))

    def place(model: nn.Module) -> None:
        parallelize_context(model, mesh["cp"], attention=attention, **options)

    return differing(BY_NAME[name], place, length)
