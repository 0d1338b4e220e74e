"""Fourteen meshes with strategies, on which one model of mixed experts trains with two optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import shardwright as sw
from shardwright.checkpoint import load, save
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.testing import rank_mesh
from shardwright.train.config import TrainConfig
from shardwright.train.data import load_corpus
from shardwright.train.model import Decoder, ModelShape, init_weights
from shardwright.train.optim import schedule
from shardwright.train.parallelize import build_model
from shardwright.train.runner import degrees
from shardwright.train.step import Trainer
from tests.checkpoint.programs import whole
from tests.placement.user_placements import PermutedRows
from tests.train.worlds import tiny

SAVED, MORE = 2, 5  # steps before the checkpoint, and after it
Told = dict[str, torch.Tensor]


@dataclass(frozen=True)
class World:
    """Degrees of the training command, or a mesh and a placement for each pattern of names."""

    ranks: int
    degrees: dict[str, int] = field(default_factory=dict)
    mesh: tuple[int, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)


USERS = {
    "embedding.weight": {"a": PermutedRows(3)},
    "blocks.*.attention.w[qv].weight": {"a": PermutedRows(5)},
    "blocks.*.attention.wo.weight": {"a": sw.Shard(1)},
    "head.weight": {"a": sw.BlockCyclic(0, 3)},
}
TWO = {
    "embedding.weight": {"a": sw.Ragged((1, 3), dims=(0, 1)), "b": sw.Shard(0)},
    "blocks.*.attention.w[qkv].weight": {"a": sw.Interleaved(0, 2), "b": sw.Shard(1)},
    "blocks.*.moe_norm.weight": {"a": sw.Owner(1), "b": PermutedRows(7)},
    "head.weight": {"a": sw.ZigZag(0), "b": sw.BlockCyclic(1, 3)},
}
WORLDS: dict[str, World] = {
    "one device": World(1),
    "replicate": World(2, {"dp_replicate": 2}),
    "replicate, experts": World(4, {"dp_replicate": 4, "ep": 2}),
    "fsdp": World(2, {"dp_shard": 2}),
    "fsdp, uneven": World(3, {"dp_shard": 3}),
    "fsdp, experts": World(4, {"dp_shard": 4, "ep": 4}),
    "hsdp, experts": World(4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    "tensor": World(2, {"tp": 2}),
    "tensor, replicate": World(4, {"tp": 2, "dp_replicate": 2}),
    "tensor, fsdp, experts": World(4, {"tp": 2, "dp_shard": 2, "ep": 2}),
    "context, fsdp": World(4, {"cp_replicate": 2, "dp_shard": 2, "ep": 2}),
    "tensor, hsdp, experts": World(8, {"tp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 4}),
    "placements of a user": World(3, mesh=(3,), plan=USERS),
    "placements on two axes": World(4, mesh=(2, 2), plan=TWO),
}


class Both:
    """Muon for the matrices of attention, AdamW for all else, as one optimizer to the trainer."""

    def __init__(self, model: Decoder) -> None:
        named = list(model.named_parameters())
        matrices = [one for name, one in named if ".attention.w" in name]
        rest = [one for name, one in named if ".attention.w" not in name]
        self.parts = {
            "muon": torch.optim.Muon(matrices, lr=0.01),
            "adamw": torch.optim.AdamW(rest, lr=0.01, eps=1e-6),
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.parts.values() for group in one.param_groups]

    def step(self) -> None:
        for one in self.parts.values():
            one.step()

    def zero_grad(self) -> None:
        for one in self.parts.values():
            one.zero_grad()


@dataclass
class Run:
    """A model in training: `step(number)` gives the loss of the whole batch."""

    model: Decoder
    optimizer: Both
    step: Any

    def forget(self) -> None:
        """Become a run that has never loaded nor trained."""
        with torch.no_grad():
            for one in self.model.parameters():
                one.fill_(0.5)
        for tuned in self.optimizer.parts.values():
            tuned.state.clear()

    def told(self) -> Told:
        names = {id(one): name for name, one in self.model.named_parameters()}
        found = {name: whole(one) for name, one in self.model.named_parameters()}
        for part, tuned in self.optimizer.parts.items():
            for parameter, state in tuned.state.items():
                found |= {f"{part}/{names[id(parameter)]}/{key}": whole(one) for key, one in state.items()}
        return found


@contextlib.contextmanager
def run_on(name: str, data: Path, seed: int) -> Iterator[Run]:
    """The model of a seed on one of the worlds; its batches never depend on the seed."""
    world = WORLDS[name]
    config: TrainConfig = tiny(data=data, seed=seed, **world.degrees)
    if world.mesh:
        yield _placed(config, world)
        return
    with degrees(config).build(device="cpu") as context:
        model = build_model(config, context)
        optimizer = Both(model)
        trainer = Trainer(
            tiny(data=data, **world.degrees), context, load_corpus(data, config.seq_len), model, optimizer
        )
        yield Run(model, optimizer, lambda number: trainer.step(number).loss)


def _placed(config: TrainConfig, world: World) -> Run:
    """By placements alone: every rank computes on the whole batch."""
    mesh = rank_mesh(world.mesh, ("a", "b")[: len(world.mesh)])
    model = Decoder(ModelShape.of(config))
    init_weights(model, config.seed)
    sw.distribute_module(model, mesh, world.plan)
    optimizer, corpus = Both(model), load_corpus(config.data, config.seq_len)
    synchronizer = GradientSynchronizer(model)

    def step(number: int) -> float:
        settings = tiny(data=config.data)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * schedule(number, settings.warmup, settings.steps)
        batch = corpus.batch(settings.seed, number, range(settings.batch_size), settings.seq_len)
        with sw.spmd(mesh):
            logits = model(batch[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        synchronizer.synchronize()
        clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        return float(whole(loss))

    return Run(model, optimizer, step)


def train_and_save(path: Path, name: str, data: Path) -> tuple[Told, list[float]]:
    """Every tensor at the checkpoint, whole, and the losses of the steps that follow."""
    with run_on(name, data, seed=0) as run:
        for number in range(1, SAVED + 1):
            run.step(number)
        save(path, run.model, run.optimizer.parts, step=SAVED)
        told = run.told()
        return told, [run.step(SAVED + number) for number in range(1, MORE + 1)]


def load_and_go_on(paths: Sequence[Path], name: str, data: Path) -> list[tuple[Told, list[float]]]:
    """The same of one model of another seed that loads the checkpoints, one after another.

    What costs time is to make a world and its plans, so that is done once. Before each load nothing of the
    one before is left: the parameters hold another number, and the optimizers nothing.
    """
    with run_on(name, data, seed=5) as run:
        return [_gone_on(run, path) for path in paths]


def _gone_on(run: Run, path: Path) -> tuple[Told, list[float]]:
    run.forget()
    load(path, run.model, run.optimizer.parts)
    told = run.told()
    return told, [run.step(SAVED + number) for number in range(1, MORE + 1)]
