"""Whole steps of every strategy, seen by the witness and by `trace()` at once."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import shardwright as sw
from shardwright.checkpoint import load, save
from shardwright.context import DeviceMeshParameters
from shardwright.grads import GradientSynchronizer, clip_grad_norm_, global_mean
from shardwright.moe import MoELayer
from shardwright.parallel import (
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing import rank_mesh

from .witness import Line, Witness, compare

_DIM = 6


@dataclass(frozen=True)
class Placed:
    """A model, the meshes that have the axes which the record may name, and the loss of one step."""

    model: nn.Module
    meshes: tuple[DeviceMesh, ...]
    loss: Callable[[], Tensor]


def _data(rows: int) -> Tensor:
    return torch.randn(rows, _DIM, generator=torch.Generator().manual_seed(1))


def _dense() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(_DIM, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, _DIM, bias=False)]
    return nn.Sequential(*layers)


def _own_rows(model: nn.Module, mesh: DeviceMesh, x: Tensor | None = None) -> Placed:
    """Each rank of the data axes has rows of its own, of uneven number."""
    rows = _data(2 + dist.get_rank() % 2) if x is None else x
    return Placed(model, (mesh,), lambda: global_mean(model(rows).square().sum(), len(rows), mesh))


def _replicate() -> Placed:
    mesh = rank_mesh((2,), ("dp",))
    return _own_rows(parallelize_replicate(_dense(), mesh), mesh)


def _fsdp() -> Placed:
    mesh = rank_mesh((2,), ("dp",))
    model = _dense()
    parallelize_fsdp(model[0], mesh)
    return _own_rows(parallelize_fsdp(model, mesh), mesh)


def _hsdp() -> Placed:
    mesh = rank_mesh((2, 2), ("dp_replicate", "dp_cp_shard"))
    return _own_rows(parallelize_hsdp(_dense(), mesh), mesh)


_CUT = {"0.weight": {"tp": sw.Shard(0)}, "0.bias": {"tp": sw.Shard(0)}, "3.weight": {"tp": sw.Shard(1)}}


def _in_spmd(model: nn.Module, mesh: DeviceMesh) -> Placed:
    x = _data(5)

    def loss() -> Tensor:
        with sw.spmd(mesh):
            return model(x).square().mean()

    return Placed(model, (mesh,), loss)


def _tensor() -> Placed:
    mesh = rank_mesh((2,), ("tp",))
    return _in_spmd(parallelize_tensor(_dense(), mesh, _CUT), mesh)


def _styles() -> Placed:
    """A block in torch's sequence-parallel plan: its norms and the edges move by torch's own DTensor."""
    mesh = rank_mesh((2,), ("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(_DIM), nn.Linear(_DIM, 8), nn.Tanh(), nn.Linear(8, _DIM))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=sw.Shard(0)),
        "3": RowwiseParallel(output_layouts=sw.Replicate()),
        "": PrepareModuleInput(input_layouts=sw.Replicate(), desired_input_layouts=sw.Shard(0)),
    }
    parallelize_tensor(model, mesh, plan)
    x = _data(4)
    return Placed(model, (mesh,), lambda: model(x).square().mean())


def _experts(strategy: str) -> Placed:
    degrees = {"data_parallel_replicate": 2} if strategy == "replicate" else {"data_parallel_shard": 2}
    context = DeviceMeshParameters(**degrees, expert_parallel=2).build()
    torch.manual_seed(0)
    layers = [nn.Linear(_DIM, _DIM), MoELayer(_DIM, 12, 4, 2, shared_expert_dim=6), nn.Linear(_DIM, _DIM)]
    model = nn.Sequential(*layers)
    dense, expert = context.mesh_for("dense"), context.mesh_for("expert")
    parallelize_expert_parallel(model, expert[["ep_replicate", "ep_shard"]], expert_shard_dim="ep_shard")
    if strategy == "replicate":
        parallelize_replicate(model, dense[["dp_replicate", "cp_replicate"]])
    else:
        parallelize_fsdp(model, dense["dp_cp_shard"])
    x = _data(2 + context.rank)
    placed = _own_rows(model, context.mesh_for("batch")[["dp", "cp"]], x)
    return Placed(model, (dense, expert, context.mesh_for("batch")), placed.loss)


def _expert_replicate() -> Placed:
    return _experts("replicate")


def _expert_fsdp() -> Placed:
    return _experts("fsdp")


def _rows_in_spmd(model: nn.Module, mesh: DeviceMesh) -> Placed:
    """Rows of its own on each rank of dp; the tensor-parallel part as one device."""
    x = _data(3)

    def loss() -> Tensor:
        with sw.spmd(mesh["tp"]):
            return model(x).square().sum().full_tensor()

    return Placed(model, (mesh,), loss)


def _tensor_replicate() -> Placed:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    model = parallelize_tensor(_dense(), mesh["tp"], _CUT)
    return _rows_in_spmd(parallelize_replicate(model, mesh["dp"]), mesh)


def _tensor_fsdp() -> Placed:
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    model = parallelize_tensor(_dense(), mesh["tp"], _CUT)
    return _rows_in_spmd(parallelize_fsdp(model, mesh["dp"]), mesh)


# name -> (ranks, how it is placed)
STRATEGIES: dict[str, tuple[int, Callable[[], Placed]]] = {
    "replicate": (2, _replicate),
    "fsdp": (2, _fsdp),
    "hsdp": (4, _hsdp),
    "tensor by placements": (2, _tensor),
    "torch's styles": (2, _styles),
    "expert, replicate": (2, _expert_replicate),
    "expert, fsdp": (2, _expert_fsdp),
    "tensor, replicate": (4, _tensor_replicate),
    "tensor, fsdp": (4, _tensor_fsdp),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD, foreach": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "AdamW, foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.1, foreach=True),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), 0.1, fused=True),
}


def step(strategy: str, optimizer: str) -> dict[str, list[Line]]:
    """Both sides of two steps: forward, backward, sum of gradients, clipping, update; then save and load."""
    placed = STRATEGIES[strategy][1]()
    tuned = OPTIMIZERS[optimizer](placed.model)
    return {
        "first step": _both(lambda: _train(placed, tuned), placed.meshes),
        "second step": _both(lambda: _train(placed, tuned), placed.meshes),
        "checkpoint": _both(lambda: _save_and_load(placed.model, tuned), placed.meshes),
    }


def explicit() -> tuple[list[Line], list[str]]:
    """Both sides of a block in explicit mode, and what is written there: one redistribution."""
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(_data(5), mesh, [sw.Shard(0)]).requires_grad_()
    w = sw.distribute_tensor(_data(_DIM), mesh, [sw.Replicate()]).requires_grad_()

    def program() -> None:
        with sw.explicit():
            y = torch.nn.functional.layer_norm(x @ w.t(), (_DIM,)).softmax(-1)
            y.redistribute({"tp": sw.Replicate()}).square().sum().backward()

    with Witness() as witness, sw.trace() as t:
        program()
    return compare(witness.asked, t.collectives, (mesh,)), [call.kind for call in witness.asked]


def compiled(backend: str) -> tuple[list[Line], list[Line], list[str]]:
    """Both sides of a compiled step's first call, which compiles it, and of its second; and the reasons."""
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(_data(4), mesh, [sw.Shard(1)])
    w = sw.distribute_tensor(_data(_DIM), mesh, [sw.Shard(0)]).requires_grad_()

    @torch.compile(backend=backend, fullgraph=True)
    def product(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).redistribute(placements=[sw.Replicate()]).tanh()

    def run() -> None:
        product(x, w).sum().backward()

    first = _both(run, (mesh,))
    with sw.trace() as t:
        second = _both(run, (mesh,))
    return first, second, [event.reason for event in t.collectives]


def threads() -> list[Line]:
    """Both sides of what a thread of the program and the program's own calls send."""
    mesh = rank_mesh((2,), ("tp",))
    x = sw.distribute_tensor(_data(5), mesh, [sw.Shard(0)])

    def program() -> None:
        thread = threading.Thread(target=x.full_tensor)
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        for peer in (dist.isend, dist.irecv) if dist.get_rank() == 0 else (dist.irecv, dist.isend):
            peer(torch.ones(7), 1 - dist.get_rank()).wait()
        sw.redistribute_many([x, x.double()], [{"tp": sw.Replicate()}] * 2)
        sw.distribute_tensor(torch.ones(600, 900), mesh, [sw.Shard(0)]).redistribute({"tp": sw.Shard(1)})
        sw.distribute_tensor(torch.ones(9), mesh, [sw.Shard(0)]).amax().full_tensor()

    return _both(program, (mesh,))


def _both(program: Callable[[], None], meshes: tuple[DeviceMesh, ...]) -> list[Line]:
    with Witness() as witness, sw.trace() as t:
        program()
    return compare(witness.asked, t.collectives, meshes)


def _train(placed: Placed, optimizer: torch.optim.Optimizer) -> None:
    placed.loss().backward()
    GradientSynchronizer(placed.model).synchronize()
    clip_grad_norm_(placed.model, 0.5)
    optimizer.step()
    optimizer.zero_grad()


def _save_and_load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(where)
    path = Path(where[0]) / "step"
    save(path, model, optimizer)
    load(path, model, optimizer)
