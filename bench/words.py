"""A training step of a decoder by words: tensor parallel, with sequence, with FSDP; beside torch's styles."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import shardwright as sw
from bench.decoder import WIDTH, decoder
from bench.hidden_gather import tell_hidden
from bench.turns import Found, Step, in_turns, told
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import parallelize_fsdp, parallelize_tensor
from shardwright.testing import RankPool, rank_mesh

_TOKENS, _ROWS = 128, 8
_COLUMNS = ("q", "k", "v", "gate", "up")
_PLACES = dict.fromkeys(("q", "k", "v", "o"), "attention") | dict.fromkeys(("gate", "up", "down"), "mlp")
_WORDS = {f"*.{_PLACES[name]}.{name}": "colwise" for name in _COLUMNS}
_WORDS |= {f"*.{_PLACES[name]}.{name}": "rowwise" for name in ("o", "down")}


def run() -> int:
    """Print what was found; 1 if losses differ, or more is sent than with torch's styles."""
    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    with RankPool() as pool:
        for ranks in (2, 4):
            for sequence in (False, True):
                found = pool.run(ranks, measure, sequence, timeout=600)
                name = f"{ranks} ranks, {'tensor and sequence' if sequence else 'tensor'}"
                bad |= not told(console, name, found)
                mine, other = found[0].counts
                # Halves of all-reduces go between pairs of ranks, which count as a message each.
                bad |= found[0].sent[0] > found[0].sent[1] or (mine > other and not sequence)
        bad |= not told(console, "2 x 2 ranks, FSDP and tensor", pool.run(4, measure_2d, timeout=600))
        tell_hidden(console, pool)
    return int(bad)


def measure(sequence: bool) -> Found:
    """Our step beside torch's."""
    torch.set_num_threads(1)
    mesh = rank_mesh((dist.get_world_size(),), ("tp",))
    x = torch.randn(_ROWS, _TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    ours = parallelize_tensor(decoder(), mesh, _WORDS, sequence_parallel=sequence)
    theirs = _in_styles(decoder(), mesh, sequence=sequence)
    given = x.chunk(mesh.size(), 1)[mesh.get_local_rank()] if sequence else x
    return in_turns(_step(ours, x, mesh), _step(theirs, given), _step(decoder(), x))


def measure_2d() -> Found:
    """Blocks are sharded over two ranks, and their weights cut over two others: our step beside torch's."""
    torch.set_num_threads(1)
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    data, tp = mesh["dp"], mesh["tp"]
    x = torch.randn(_ROWS, _TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    rows = x.chunk(2)[data.get_local_rank()]
    ours = parallelize_tensor(decoder(), tp, _WORDS)
    theirs = _in_styles(decoder(), tp, sequence=False)
    for place, model in ((parallelize_fsdp, ours), (_sharded, theirs)):
        for part in (*model.children(), model):
            place(part, data)
    synchronizer = GradientSynchronizer(ours)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, theirs))

    def step() -> Tensor:
        with sw.spmd(tp):
            loss = global_mean(ours(rows).square().sum(), rows.numel(), data)
            with synchronizer.overlapped():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = loss.detach()
        return done.full_tensor() if isinstance(done, DTensor) else done

    def their_step() -> Tensor:
        loss = theirs(rows).square().mean()
        loss.backward()
        other.step()
        other.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data.get_group())
        return total / data.size()

    return in_turns(step, their_step, _step(decoder(), x))


def _sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def _step(model: nn.Module, x: Tensor, mesh: DeviceMesh | None = None) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        with nullcontext() if mesh is None else sw.spmd(mesh):
            loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = loss.detach()
        return done.full_tensor() if isinstance(done, DTensor) else done

    return step


def _in_styles(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> nn.Module:
    plan: dict[str, ParallelStyle] = {f"{_PLACES[name]}.{name}": ColwiseParallel() for name in _COLUMNS}
    for name in ("o", "down"):
        plan[f"{_PLACES[name]}.{name}"] = RowwiseParallel(
            output_layouts=Shard(1) if sequence else Replicate()
        )
    if sequence:
        for name in ("attention", "mlp"):
            plan[name] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan[f"before_{name}"] = SequenceParallel(use_local_output=True)
    *blocks, norm = model.children()
    for block in blocks:
        parallelize_module(block, mesh, plan)
    if sequence:
        parallelize_module(norm, mesh, SequenceParallel())
    return model
