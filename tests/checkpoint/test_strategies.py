"""Checkpoints of real strategies: what one set of degrees trained and saved, any other loads, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint import load, save
from shardwright.context.context import DistributedContext
from shardwright.train.config import TrainConfig
from shardwright.train.data import load_corpus
from shardwright.train.model import Decoder
from shardwright.train.optim import make_optimizer
from shardwright.train.parallelize import build_model
from shardwright.train.runner import degrees
from shardwright.train.step import Trainer
from tests.checkpoint.programs import same, whole
from tests.train.worlds import tiny, write_text

Ranks = Callable[..., list[Any]]

DEGREES: dict[str, dict[str, int]] = {
    "one device": {},
    "hsdp and experts": {"dp_replicate": 2, "dp_shard": 2, "ep": 4},
    "tp, then fsdp, uneven": {"tp": 2, "dp_shard": 3, "hidden": 20, "heads": 2},
    "replicate": {"dp_replicate": 2, "ep": 2},
    "cp and fsdp": {"cp_replicate": 2, "dp_shard": 2, "ep": 2},
    "tp and experts": {"tp": 2, "dp_shard": 2, "ep": 2},
    "three shards": {"dp_shard": 3},
}


def config_of(name: str, data: Path) -> TrainConfig:
    settings = {"hidden": 20, "heads": 2, "data": data, **DEGREES[name]}
    return tiny(**settings)


def train_and_save(path: Path, name: str, data: Path) -> dict[str, torch.Tensor]:
    """Two steps on these degrees, then a checkpoint; every tensor, whole."""
    config = config_of(name, data)
    with degrees(config).build(device="cpu") as context:
        trainer = make_trainer(config, context)
        for step in (1, 2):
            trainer.step(step)
        save(path, model=trainer.model, optimizer=trainer.optimizer, step=2)
        return everything(trainer.model, trainer.optimizer)


def load_all(path: Path, name: str, data: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Every tensor after loading on these degrees, and the loss of the step that follows."""
    config = config_of(name, data)
    with degrees(config).build(device="cpu") as context:
        trainer = make_trainer(config.model_copy(update={"seed": 5}), context)
        load(path, model=trainer.model, optimizer=trainer.optimizer)
        found = everything(trainer.model, trainer.optimizer)
        trainer.config = config
        return found, trainer.step(3).loss


def make_trainer(config: TrainConfig, context: DistributedContext) -> Trainer:
    model = build_model(config, context)
    return Trainer(
        config, context, load_corpus(config.data, config.seq_len), model, make_optimizer(model, config)
    )


def everything(model: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(one): name for name, one in model.named_parameters()}
    found = {name: whole(one) for name, one in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}/{key}": whole(one) for key, one in state.items()}
    return found


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("tp and experts", ["one device", "three shards"]),
        pytest.param("hsdp and experts", list(DEGREES), marks=pytest.mark.slow),
        pytest.param("tp, then fsdp, uneven", list(DEGREES), marks=pytest.mark.slow),
    ],
)
def test_what_one_strategy_saved_every_other_loads_and_goes_on_from(
    ranks: Ranks, tmp_path: Path, source: str, targets: list[str]
) -> None:
    data = tmp_path / "text"
    write_text(data)
    saved = ranks(world_of(source, data), train_and_save, tmp_path / "c", source, data)[0]
    assert any(name.endswith("/exp_avg_sq") for name in saved)
    losses = []
    for target in targets:
        for found, loss in ranks(world_of(target, data), load_all, tmp_path / "c", target, data):
            assert same(found, saved), target
            losses.append(loss)
    assert max(losses) - min(losses) <= 1e-6 * max(losses)


def world_of(name: str, data: Path) -> int:
    return config_of(name, data).world or 1
