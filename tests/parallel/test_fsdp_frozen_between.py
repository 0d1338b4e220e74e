"""What is frozen or thawed between forwards and backwards is so, also where a unit keeps its parameters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp
from shardwright.testing.meshes import rank_mesh
from tests.tiers import all_but

Ranks = Callable[..., list[Any]]
Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Program = Callable[[nn.Module, torch.Tensor, bool, Run], None]

PLAN = {"0.weight": {"tp": sw.Shard(0)}, "0.bias": {"tp": sw.Shard(0)}, "2.weight": {"tp": sw.Shard(1)}}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def _set(model: nn.Module, trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if not name.startswith("2."):  # the first, which reads no gradient, and the last
            parameter.requires_grad_(trained)


def _after_a_step(model: nn.Module, x: torch.Tensor, trained: bool, run: Run) -> None:
    run(model, x).backward()
    _set(model, not trained)
    for _ in range(2):
        run(model, x).backward()


def _after_a_metric(model: nn.Module, x: torch.Tensor, trained: bool, run: Run) -> None:
    run(model, x)  # no backward follows
    _set(model, not trained)
    run(model, x).backward()


def _after_an_evaluation(model: nn.Module, x: torch.Tensor, trained: bool, run: Run) -> None:
    with torch.no_grad():
        run(model, x)
    _set(model, not trained)
    run(model, x).backward()


def _before_the_backward(model: nn.Module, x: torch.Tensor, trained: bool, run: Run) -> None:
    loss = run(model, x)
    _set(model, not trained)
    loss.backward()
    run(model, x).backward()


PROGRAMS: list[Program] = [_after_a_step, _after_a_metric, _after_an_evaluation, _before_the_backward]


def _plainly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def _cut(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with sw.spmd(rank_mesh((2, 2), ("dp", "tp"))["tp"]):
        return model(x).square().sum()


def _placed(model: nn.Sequential, strategy: str, keep: bool | None, units: str) -> None:
    shard: Callable[..., nn.Module] = parallelize_fsdp
    mesh = rank_mesh((4,), ("dp",)) if strategy == "fsdp" else rank_mesh((2, 2), ("dp", "tp"))
    if strategy == "hsdp":
        shard, extra = parallelize_hsdp, {"shard_dim": "tp"}
    else:
        extra = {}
    if strategy == "tensor and fsdp":
        sw.distribute_module(model, mesh["tp"], PLAN)
        mesh = mesh["dp"]
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for unit in {"layers": layers, "root": [model], "both": [*layers, model]}[units]:
        shard(unit, mesh, **extra, reshard_after_forward=keep)


def _as_on_one_device(strategy: str, keep: bool | None, units: str) -> None:
    rank = torch.distributed.get_rank()
    for program, trained in itertools.product(PROGRAMS, (False, True)):
        alone, x = _net(), torch.randn(8, 6)
        _set(alone, trained)
        model = copy.deepcopy(alone)
        _placed(model, strategy, keep, units)
        program(alone, x, trained, _plainly)
        part = x.chunk(2)[rank // 2] if "tensor" in strategy else x.chunk(4)[rank]
        program(model, part, trained, _cut if "tensor" in strategy else _plainly)
        GradientSynchronizer(model).synchronize()
        for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            said = f"{program.__name__} {name}, trained at first: {trained}"
            assert (mine.grad is None) == (other.grad is None), said
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad.full_tensor(), other.grad, msg=said)


@pytest.mark.parametrize(
    ("strategy", "keep", "units"),
    all_but(
        [("fsdp", None, "root"), ("fsdp", False, "layers")],
        [
            ("fsdp", None, "root"),
            ("fsdp", True, "both"),
            ("fsdp", False, "layers"),
            ("hsdp", False, "both"),
            ("tensor and fsdp", False, "both"),
        ],
    ),
)
def test_what_is_frozen_or_thawed_between_is_so(
    ranks: Ranks, strategy: str, keep: bool | None, units: str
) -> None:
    ranks(4, _as_on_one_device, strategy, keep, units)
