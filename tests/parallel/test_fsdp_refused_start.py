"""A first forward that `fully_shard` refuses has started nothing: what was missing is given, and it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.parallel import parallelize_fsdp, parallelize_hsdp
from shardwright.testing.meshes import rank_mesh
from shardwright.testing.rank_device import here

Ranks = Callable[..., list[Any]]

X = torch.linspace(-1, 1, 24).view(4, 6)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _placed(model: nn.Sequential, strategy: str, *, units: bool) -> nn.Sequential:
    hybrid = strategy == "hsdp"
    mesh = rank_mesh((2, 2), ("replicate", "shard")) if hybrid else rank_mesh((4,), ("shard",))
    for module in (model[0], model[2], model) if units else (model,):
        if hybrid:
            parallelize_hsdp(module, mesh, shard_dim="shard")
        else:
            parallelize_fsdp(module, mesh)
    return model


def _gets_its_memory_late(strategy: str, units: bool) -> None:
    plain = _net()
    plain(X).square().sum().backward()
    with torch.device("meta"):
        model = _net()
    _placed(model, strategy, units=units)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="should be materialized from meta device"):
            model(X)
    model.to_empty(device=here())
    values = _placed(_net(), strategy, units=units).state_dict()
    model.load_state_dict(values)
    torch.testing.assert_close(model(X), plain(X))
    (model(X).square().sum() / 4).backward()  # four copies of the batch
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_a_model_that_gets_its_memory_after_its_first_forward_trains(
    ranks: Ranks, strategy: str, units: bool
) -> None:
    ranks(4, _gets_its_memory_late, strategy, units)


def _runs_a_part_before_the_rest_is_sharded() -> None:
    model = _net()
    mesh = rank_mesh((2,), ("shard",))
    parallelize_fsdp(model[0], mesh)
    part = model[0](X)
    parallelize_fsdp(model, mesh)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has already been lazily initialized"):
            model(X)
        torch.testing.assert_close(model[0](X), part)  # the part goes on as it did


def test_a_part_that_ran_on_its_own_before_is_the_same_error_each_time(ranks: Ranks) -> None:
    ranks(2, _runs_a_part_before_the_rest_is_sharded)
