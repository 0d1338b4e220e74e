"""Means, moments and losses on real ranks: the logical count divides, weights and ignored targets too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.tiers import only

Function = Callable[..., torch.Tensor]


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


_TARGETS = torch.tensor([0, 3, -100, 2, 1])
_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 3.0])
_ELSE = _randn(5, 4).flip(0)

# name -> a function of a (5, 4) tensor and of how to distribute its other operands
CASES: dict[str, Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
    "mean": lambda x, _: x.mean(),
    "mean of a dim": lambda x, _: x.mean(0).sin().sum(),
    "mean, kept": lambda x, _: (x - x.mean(1, keepdim=True)).pow(3).sum(),
    "var": lambda x, _: x.var(),
    "var of a dim": lambda x, _: x.var(0, correction=0).sin().sum(),
    "std": lambda x, _: x.std(1).sum(),
    "mse": lambda x, put: functional.mse_loss(x, put(_ELSE)),
    "mse, summed": lambda x, put: functional.mse_loss(x, put(_ELSE), reduction="sum"),
    "l1": lambda x, put: functional.l1_loss(x, put(_ELSE)),
    "huber": lambda x, put: functional.huber_loss(x, put(_ELSE)),
    "smooth l1": lambda x, put: functional.smooth_l1_loss(x, put(_ELSE)),
    "binary": lambda x, put: functional.binary_cross_entropy_with_logits(x, put(_ELSE.sigmoid())),
    "cross-entropy": lambda x, put: functional.cross_entropy(x, put(_TARGETS)),
    "cross-entropy, summed": lambda x, put: functional.cross_entropy(x, put(_TARGETS), reduction="sum"),
    "weighted": lambda x, put: functional.cross_entropy(x, put(_TARGETS), weight=put(_WEIGHTS)),
    "smoothed": lambda x, put: functional.cross_entropy(x, put(_TARGETS), label_smoothing=0.1),
    "norm": lambda x, _: x.norm(),
    "norm of a dim": lambda x, _: torch.linalg.vector_norm(x, dim=0).sin().sum(),
    "max": lambda x, _: x.max(),
    "logsumexp": lambda x, _: x.logsumexp(0).sum(),
    "layer norm": lambda x, put: functional.layer_norm(x, (4,), put(_WEIGHTS)).pow(2).sum(),
    "batch norm": lambda x, put: (
        functional.batch_norm(x, put(torch.zeros(4)), put(torch.ones(4)), put(_WEIGHTS), training=True)
        .pow(3)
        .sum()
    ),
    "batch norm, evaluated": lambda x, put: functional.batch_norm(x, put(_WEIGHTS), put(_WEIGHTS)).sum(),
    "rms norm": lambda x, put: functional.rms_norm(x, (4,), put(_WEIGHTS)).pow(3).sum(),
}


def _values_and_gradients(names: list[str]) -> dict[str, str]:
    """What differs from one device, by case and placement; nothing when all is well."""
    import shardwright as sw

    size = torch.distributed.get_world_size()
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    uneven = sw.Ragged(tuple(range(size)), (0,))
    ways = [sw.Shard(0), sw.Shard(1), sw.Interleaved(1, 2), uneven, sw.Replicate()]
    wrong: dict[str, str] = {}
    for name in names:
        expected = _on_one_device(CASES[name])
        for way in ways:
            x = sw.distribute_tensor(_randn(5, 4), mesh, [way]).requires_grad_()
            value = CASES[name](x, lambda y: sw.distribute_tensor(y, mesh, [sw.Replicate()]))
            value.backward()
            found = value.detach().full_tensor(), x.grad.full_tensor()
            for what, one, other in zip(("value", "gradient"), found, expected, strict=True):
                if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                    wrong[f"{name} under {way}: {what}"] = f"{one} instead of {other}"
    return wrong


def _on_one_device(case: Function) -> tuple[torch.Tensor, torch.Tensor]:
    x = _randn(5, 4).requires_grad_()
    value = case(x, lambda y: y)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad


@pytest.mark.parametrize("size", only([2], [2, 3]))
def test_means_and_losses_give_the_single_device_answer(size: int, ranks: Callable[..., list[Any]]) -> None:
    """Uneven and empty parts included: a mean of means, or of weights seen by one rank, is another number."""
    assert ranks(size, _values_and_gradients, list(CASES)) == [{}] * size
