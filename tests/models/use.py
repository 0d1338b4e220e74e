"""A model of `transformers` in use: placed or not, and the rows that it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.parallel import parallelize_replicate

from .check import DATA, FSDP, ROWS, place
from .configs import BY_NAME, batch_of

REPLICATE = "replicate"
Found = dict[str, torch.Tensor | None]


class Run:
    """A model on one device (`mesh` is None) or sharded, and the rows that it reads.

    Where ranks read their own rows (`replicate`, `fsdp`), one device reads the parts one after another.
    """

    def __init__(self, name: str, sharding: str, mesh: DeviceMesh | None) -> None:
        self.architecture, self.sharding, self.mesh = BY_NAME[name], sharding, mesh
        self.own_rows = sharding in {REPLICATE, FSDP}
        self.model: Any = None

    def start(self, model: nn.Module | None = None, **config: Any) -> Any:
        """The model, placed."""
        model = self.build(**config) if model is None else model
        if self.mesh is not None:
            if self.sharding == REPLICATE:
                parallelize_replicate(model, self.mesh)
            else:
                place(model, self.sharding, self.mesh)
        self.model = model
        return model

    def build(self, **config: Any) -> Any:
        """The model as it is on one device, with other values in its configuration."""
        sizes = {**self.architecture.sizes, **config}
        return dataclasses.replace(self.architecture, sizes=sizes).build()

    def parts(self, batch: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The batches that this run computes, one after another."""
        batch = batch_of(self.architecture, ROWS) if batch is None else batch
        if not self.own_rows:
            yield self._put(batch)
            return
        ranks = range(dist.get_world_size()) if self.mesh is None else [dist.get_rank()]
        for rank in ranks:
            yield {n: v.tensor_split(dist.get_world_size())[rank] for n, v in batch.items()}

    def _put(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.mesh is None:
            return batch
        cut = sw.Shard(0) if self.sharding == DATA else sw.Replicate()
        return {n: sw.distribute_tensor(v, self.mesh, (cut,)) for n, v in batch.items()}

    def inside(self) -> AbstractContextManager[Any]:
        """Where the model computes on distributed tensors, the block that lets it."""
        return nullcontext() if self.mesh is None or self.own_rows else sw.spmd(self.mesh)

    def whole(self, found: dict[str, Any]) -> Found:
        """Plain tensors of the whole batch; a list holds one value per part."""
        return {n: self._whole(n, v) for n, v in found.items()}

    def _whole(self, name: str, value: Any) -> Any:
        if isinstance(value, list):
            if self.mesh is not None and self.own_rows and not isinstance(value[0], DTensor):
                parts: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(parts, value[0])
                value = parts
            value = [x.full_tensor() if isinstance(x, DTensor) else x for x in value]
            return torch.stack(value).sum(0) if value[0].ndim == 0 else torch.cat(value)
        return value.full_tensor() if isinstance(value, DTensor) else value

    def gradients(self) -> dict[str, Any]:
        """Every gradient, by the name of its parameter."""
        return {f"gradient of {n}": p.grad for n, p in self.model.named_parameters()}
