"""A stage as torch's schedules drive it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.parallel.pipeline.batch import Batch
from shardwright.parallel.pipeline.border import FindMesh, arriving, leaving
from shardwright.parallel.pipeline.conductor import Run
from shardwright.parallel.pipeline.learn import Borders
from shardwright.parallel.pipeline.split import Split
from shardwright.tensor.spec import finished
from shardwright.tensor.wrap import as_ours

Caller = Callable[[Run, Batch], Any]
Loss = Callable[[Any, Any], Tensor]


class StageModule(nn.Module):
    """What one stage computes of one micro-batch: what arrived -> what leaves, or the loss.

    Args: call: the model, called for a run; what it returns, None before the last stage. batches: the
        micro-batches of this step.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        stage: int,
        borders: Borders,
        call: Caller,
        find: FindMesh,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self.stage, self.last = stage, stage == split.stages - 1
        self.arrives = borders.crossing.get(stage, ())
        self.leaves = borders.crossing.get(stage + 1, ())
        self.leaf_of = {v: borders.leaf(v) for v in (*self.arrives, *self.leaves)}
        self.known, self.wanted = borders.earlier(stage), borders.made(stage)
        self.copied = frozenset(borders.rewritten)
        self.call, self.find, self.device = call, find, device
        self.hollow = functools.cache(lambda leaf: split.hollow(leaf, device))  # nobody writes into them
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.batches: list[Batch] = []
        self.number = 0
        self.outputs: list[Any] | None = None
        self.loss: Loss | None = None

    def examples(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What arrives and what leaves, without memory."""
        came = tuple(self.leaf_of[v].example(self.find) for v in self.arrives)
        if self.last:
            return came, (torch.empty((), device="meta", requires_grad=True),)
        return came, tuple(self.leaf_of[v].example(self.find) for v in self.leaves)

    def forward(self, *arrived: Tensor) -> tuple[Tensor, ...]:
        """The local parts that leave; of the last stage, the loss."""
        batch = self.batches[self.number]
        received = {
            value: arriving(local, self.leaf_of[value], self.find)
            for value, local in zip(self.arrives, arrived, strict=True)
        }
        handed = {v: x.clone() if v in self.copied and v in self.leaves else x for v, x in received.items()}
        run = Run(self.stage, handed, self.known, self.wanted, self.hollow, copied=self.copied)
        out = self.call(run, batch)
        if self.last:
            return (self._finished(out, batch[2]),)
        values = {**received, **run.kept}
        return tuple(leaving(values[v], self.leaf_of[v], self.find, self.anchor) for v in self.leaves)

    def _finished(self, out: Any, target: Any) -> Tensor:
        """This micro-batch's term of the loss, a plain scalar; zero where there is no loss."""
        if self.outputs is not None:
            self.outputs.append(out)
        if self.loss is None:
            return torch.zeros((), device=self.device)
        term = self.loss(out, target)
        if isinstance(term, TorchDTensor):
            ours = as_ours(term)
            layout = finished(ours._spec.layout)
            term = ours.redistribute(ours.device_mesh, list(layout.placements)).to_local()
        return term


class Stage(PipelineStage):
    """torch's stage, told which micro-batch it runs; `StageModule` has the arguments of each."""

    def __init__(self, module: StageModule, split: Split) -> None:
        came, leaves = module.examples()
        super().__init__(
            module,
            module.stage,
            split.stages,
            module.device,
            input_args=came,
            output_args=leaves,
            group=split.mesh.get_group(),
        )

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """As torch's, of this micro-batch."""
        module: Any = self.submod
        module.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
