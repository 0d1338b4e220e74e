"""One rank's part of a training step: forward, backward, reduction of gradients, clipping, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.comm.collectives import all_reduce
from shardwright.comm.record import Recorder
from shardwright.context.domains import BATCH_DOMAIN, FLAT_DOMAIN
from shardwright.context.submesh import submesh
from shardwright.grads.clip import clip_grad_norm_
from shardwright.grads.loss import global_mean
from shardwright.grads.synchronizer import GradientSynchronizer
from shardwright.moe.layer import MoELayer
from shardwright.train.data import Corpus, share
from shardwright.train.optim import Kind, set_learning_rate

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shardwright.context.context import DistributedContext
    from shardwright.train.config import TrainConfig
    from shardwright.train.model import Decoder


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

    def before(self, step: int, trainer: Trainer) -> None:
        """Before the forward pass of `step`."""

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
        self._readers = submesh(batch, ("dp", "cp"))
        self._reader = batch["dp"].get_local_rank() * batch["cp"].size() + batch["cp"].get_local_rank()
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]

    def step(self, step: int, stop_requested: Callable[[], bool] = lambda: False) -> StepResult:
        """Train on the batch of `step` (counted from 1). Collective.

        Args: stop_requested: asked at the end of the step; the result says whether any rank's said yes.
        Cost: what the strategies send, and one all-reduce of a few hundred bytes over the world.
        """
        for observer in self.observers:
            observer.before(step, self)
        lr = set_learning_rate(self.optimizer, self.config, step, self.kind)
        recorder = Recorder()
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
        rows = share(count, self.config.batch_ranks, self._reader)
        batch = self.corpus.held_out_windows(count, rows, self.config.seq_len).to(self.context.device)
        with torch.no_grad():
            total = self._loss_sum(batch).double()
        return float(self._total(total)) / (count * self.config.seq_len)

    @property
    def choices(self) -> list[Tensor]:
        """Which experts this rank's tokens went to in the last step, per layer:  int64 [tokens, k]."""
        return [layer.choices for layer in self._layers]

    def _rows(self, step: int) -> Tensor:
        rows = share(self.config.batch_size, self.config.batch_ranks, self._reader)
        batch = self.corpus.batch(self.config.seed, step, rows, self.config.seq_len)
        return batch.to(self.context.device)

    def _backward(self, batch: Tensor) -> Tensor:
        """Leave complete gradients of the mean loss over the global batch; return that mean."""
        loss = global_mean(self._loss_sum(batch), batch[:, 1:].numel(), self._readers)
        with self.synchronizer.overlapped():
            loss.backward()
        return loss.detach()

    def _loss_sum(self, batch: Tensor) -> Tensor:
        with self._precision():
            logits = self.model(batch[:, :-1])
        targets = batch[:, 1:].flatten()
        return functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")

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
        return clip_grad_norm_(self.model.parameters(), limit)

    def _agree(self, loss: Tensor, norm: Tensor, lr: float, sent: int, *, stop: bool) -> StepResult:
        loads = torch.stack([layer.tokens_per_expert for layer in self._layers]).double()
        mine = torch.cat((loads.new_tensor([sent, stop]), loads.flatten()))
        sent_by_all, stops, *counts = self._total(mine).tolist()
        return StepResult(
            loss=float(loss),
            grad_norm=float(norm),
            lr=lr,
            loads=torch.tensor(counts, dtype=torch.float64).view(loads.shape),
            bytes_communicated=round(sent_by_all * self.config.tp),
            stop=stops > 0,
        )

    def _total(self, x: Tensor) -> Tensor:
        """Sum over the world; ranks of one tp group have read the same text and count once."""
        world = self.context.mesh_for(FLAT_DOMAIN)
        return all_reduce(x, "sum", world.get_group(), axis="world", reason="statistics") / self.config.tp
