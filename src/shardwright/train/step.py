"""One rank's part of a training step: forward, backward, reduction of gradients, clipping, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer

from shardwright.comm.collectives import all_reduce
from shardwright.comm.record import Recorder
from shardwright.context.context import DistributedContext
from shardwright.context.domains import BATCH_DOMAIN, FLAT_DOMAIN
from shardwright.context.submesh import submesh
from shardwright.grads.clip import clip_grad_norm_
from shardwright.grads.synchronizer import GradientSynchronizer
from shardwright.parallel.pipeline.pipeline import Pipeline
from shardwright.train.config import TrainConfig
from shardwright.train.data import Corpus
from shardwright.train.model import Decoder
from shardwright.train.optim import Kind, set_learning_rate
from shardwright.train.places import Place, readers
from shardwright.train.routes import Routes

_IGNORED = -100


@dataclass(frozen=True)
class StepResult:
    """What all ranks agree on after a step.

    `loss` is the mean over the global batch before the update; `loads` counts tokens per expert,
    float64 [layers, experts]; `stop` is true on every rank once any rank was asked to stop.
    """

    loss: float
    grad_norm: float
    lr: float
    loads: Tensor
    bytes_communicated: int
    stop: bool


class Observer(Protocol):
    """Looks at a run from inside; every rank calls it at the same points, so it may communicate."""

    def reduced(self, step: int, trainer: Trainer) -> None:
        """Gradients are complete, not yet clipped."""

    def after(self, step: int, trainer: Trainer, result: StepResult) -> None:
        """After the update."""


class Trainer:
    """Model, optimizer and text of one rank. Not the loop: it writes no files and never decides to end."""

    def __init__(
        self,
        config: TrainConfig,
        context: DistributedContext,
        corpus: Corpus,
        model: Decoder,
        optimizer: Optimizer,
        kind: Kind = "adamw",
    ) -> None:
        self.config, self.context, self.corpus = config, context, corpus
        self.model, self.optimizer, self.kind = model, optimizer, kind
        self.observers: list[Observer] = []
        self.synchronizer = GradientSynchronizer(model)
        batch = context.mesh_for(BATCH_DOMAIN)
        self._readers = submesh(batch, ("dp", "cp", "tp") if config.sp else ("dp", "cp"))
        self.place = Place.of(config, context.rank)
        self._positions = self.place.positions().to(context.device)
        self.routes = Routes(model, config.micro_batches or 1)
        self._pipeline = self._staged() if config.pp > 1 else None

    def step(self, step: int, stop_requested: Callable[[], bool] = lambda: False) -> StepResult:
        """Train on the batch of `step` (counted from 1). Collective.

        Args: stop_requested: asked at the end of the step; the result says whether any rank's said yes.
        Cost: what the strategies send, and one all-reduce of a few hundred bytes over the world.
        """
        lr = set_learning_rate(self.optimizer, self.config, step, self.kind)
        recorder = Recorder()
        self.routes.begin()
        with recorder:
            loss = self._backward(self._rows(step))
        for observer in self.observers:
            observer.reduced(step, self)
        with recorder:
            norm = self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
        result = self._agree(loss, norm, lr, recorder.bytes, stop=stop_requested())
        for observer in self.observers:
            observer.after(step, self, result)
        return result

    def held_out_loss(self) -> float:
        """Mean loss over the fixed held-out windows, each read by one rank. Collective."""
        count = self.config.eval_windows
        rows = self.place.rows(count)
        batch = self.corpus.held_out_windows(count, rows, self.config.seq_len).to(self.context.device)
        if self._pipeline is not None:
            return float(self._total(self._staged_loss(batch))) / (count * self.config.seq_len)
        with torch.no_grad():
            total = self._loss_sum(batch).double()
        return float(self._total(total)) / (count * self.config.seq_len)

    def _staged(self) -> Pipeline:
        return Pipeline(
            self.model, _cross_entropy, micro_batches=self.config.micro_batches or 1, data=self._readers
        )

    def _staged_loss(self, batch: Tensor) -> Tensor:
        """The sum of the losses of these windows, on the first stage; zero on others."""
        inputs, targets = self._cut(batch)
        micro = self.config.micro_batches or 1
        missing = -len(batch) % micro or (0 if len(batch) else micro)
        inputs = functional.pad(inputs, (0, 0, 0, missing))  # rows of which no position counts
        targets = functional.pad(targets, (0, 0, 0, missing), value=_IGNORED)
        with self._precision():
            total = cast("Pipeline", self._pipeline).evaluate(inputs, target=targets).double()
        return total if self.place.stage == 0 else torch.zeros_like(total)

    def _cut(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets at this rank's positions:  [b, s + 1] -> [b, t] twice."""
        return batch[:, self._positions], batch[:, self._positions + 1]

    def _rows(self, step: int) -> Tensor:
        rows = self.place.rows(self.config.batch_size)
        batch = self.corpus.batch(self.config.seed, step, rows, self.config.seq_len)
        return batch.to(self.context.device)

    def _backward(self, batch: Tensor) -> Tensor:
        """Leave complete gradients of the mean loss over the global batch.

        Returns: this rank's term of that mean (of a pipeline all of it): how many positions all ranks read is
        known, so nobody waits for the others between the forward and the backward.
        """
        if self._pipeline is not None:
            inputs, targets = self._cut(batch)
            with self._precision():
                loss = self._pipeline.step(inputs, target=targets, count=targets.numel())
            self.synchronizer.synchronize()
            return loss
        loss = self._loss_sum(batch) / (self.config.batch_size * self.config.seq_len)
        with self.synchronizer.overlapped():
            loss.backward()
        return loss.detach()

    def _loss_sum(self, batch: Tensor) -> Tensor:
        inputs, targets = self._cut(batch)
        with self._precision():
            logits = self.model(inputs)
        return _cross_entropy(logits, targets)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        """Parameters, gradients and reductions stay float32; bfloat16 is for the matrix products (autocast).

        Rejected: `fully_shard`'s mixed precision, which the replicated and expert parameters would not have.
        """
        half = self.config.dtype == "bfloat16"
        with torch.autocast(self.context.device.type, dtype=torch.bfloat16, enabled=half):
            yield

    def _clip(self) -> Tensor:
        limit = self.config.clip if self.kind == "adamw" else float("inf")
        return clip_grad_norm_(self.model, limit)

    def _agree(self, loss: Tensor, norm: Tensor, lr: float, sent: int, *, stop: bool) -> StepResult:
        config = self.config
        loads = self.routes.counts(config.layers, config.experts, loss.device)
        mine = torch.cat((loads.new_tensor([float(loss), sent, stop]), loads.flatten()))
        mean, sent_by_all, stops, *counts = self._total(mine).tolist()
        return StepResult(
            loss=mean if self._pipeline is None else float(loss),
            grad_norm=float(norm),
            lr=lr,
            loads=torch.tensor(counts, dtype=torch.float64).view(loads.shape),
            bytes_communicated=round(sent_by_all * readers(self.config)),
            stop=stops > 0,
        )

    def _total(self, x: Tensor) -> Tensor:
        """Sum over the world; ranks that have read the same tokens, of one tp group, count once."""
        world = self.context.mesh_for(FLAT_DOMAIN)
        return all_reduce(x, "sum", world.get_group(), axis="world", reason="statistics") / readers(
            self.config
        )


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum over all positions that count."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=_IGNORED
    )
