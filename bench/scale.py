"""Importing; and 20,000 parameters on 16,384 ranks: placed beside torch's, synchronised, under FSDP."""

from __future__ import annotations

import atexit
import functools
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp

_MESH = (16, 1024)
_PARAMETERS = 20_000
_PLACED_IN_A_TURN = 500
_TURNS = 7
_PEER = "import torch, torch.distributed.tensor as t; t.DTensor"
_OURS = f"{_PEER}\nimport shardwright as sw; sw.DTensor"


class _Holder(nn.Module):
    """A module of so many parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


def run() -> None:
    """Print CPU seconds of the import and of each thing that is done once per parameter."""
    print(f"importing, beside torch and its DTensor: {_import_seconds():.2f} s of CPU")
    dist.init_process_group("fake", rank=0, world_size=_MESH[0] * _MESH[1], store=FakeStore())
    mesh = init_device_mesh("cpu", _MESH, mesh_dim_names=("dp", "tp"))
    print(f"the rest as rank 0 of {mesh.size():,} (the fake backend, which sends nothing)")
    _print_placing(mesh)
    _print_synchronizing(mesh)
    module = _Holder(nn.Parameter(torch.empty(1024, 4)) for _ in range(_PARAMETERS))
    seconds = _cpu(lambda: parallelize_fsdp(module, mesh["dp"]))
    print(f"parallelize_fsdp of {_PARAMETERS:,} parameters: {seconds:.1f} s")
    dist.destroy_process_group()


def _import_seconds() -> float:
    """How much longer the first use of our DTensor takes than that of torch's, in processes of their own.

    Not for the first time: Python keeps what it compiled, where it may write.
    """
    _process(_OURS)
    return statistics.median(_process(_OURS) - _process(_PEER) for _ in range(_TURNS))


def _process(program: str) -> float:
    kept = {**os.environ, "PYTHONPYCACHEPREFIX": _compiled(), "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, env=kept)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@functools.cache
def _compiled() -> str:
    """A folder for compiled modules, whatever the environment says of them."""
    folder = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _cpu(call: Callable[[], object]) -> float:
    before = time.process_time()
    call()
    return time.process_time() - before


def _print_placing(mesh: DeviceMesh) -> None:
    """`distribute_tensor`, in turns: rank 0's values sent to all, and each rank's own."""
    for name, source in (("rank 0's values, sent", 0), ("each rank's own values", None)):
        times = []
        for _ in range(_TURNS):
            plain = [nn.Parameter(torch.empty(1024, 4)) for _ in range(_PLACED_IN_A_TURN)]
            ours = _cpu(
                lambda plain=plain, source=source: [
                    sw.distribute_tensor(p, mesh, [sw.Replicate(), sw.Shard(0)], src_data_rank=source)
                    for p in plain
                ]
            )
            theirs = _cpu(
                lambda plain=plain, source=source: [
                    peer.distribute_tensor(p, mesh, [peer.Replicate(), peer.Shard(0)], src_data_rank=source)
                    for p in plain
                ]
            )
            times.append((ours / len(plain), theirs / len(plain), ours / theirs))
        own, other, ratio = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"placing, {name}: {own * 1e6:.1f} us each, torch {other * 1e6:.1f}, ratio {ratio:.3f}")


def _print_synchronizing(mesh: DeviceMesh) -> None:
    """A step's gradients, beside the same flat buckets made of plain tensors by hand."""
    parameters = [
        nn.Parameter(sw.distribute_tensor(torch.empty(1024, 4), mesh, [sw.Replicate(), sw.Shard(0)]))
        for _ in range(_PARAMETERS)
    ]
    synchronizer = GradientSynchronizer(((f"p{i}", p) for i, p in enumerate(parameters)), static=True)
    times = []
    for _ in range(_TURNS):
        for p in parameters:
            p.grad = sw.DTensor.from_local(torch.zeros(1, 4), mesh, [sw.Partial(), sw.Shard(0)])
        ours = _cpu(synchronizer.synchronize)
        terms = [torch.zeros(1, 4) for _ in parameters]
        hand = _cpu(lambda terms=terms: _summed(terms, mesh.get_group("dp")))
        times.append((ours, hand))
    own, hand = (statistics.median(column) / _PARAMETERS * 1e6 for column in zip(*times, strict=True))
    print(
        f"synchronising: {own:.1f} us each; flat buckets by hand {hand:.1f}, so {own - hand:.1f} beside them"
    )


def _summed(terms: Iterable[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All terms in one bucket: copied into it, reduced, and views of it as the results."""
    terms = list(terms)
    flat = torch.cat([term.reshape(-1) for term in terms])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([term.numel() for term in terms])
    return [piece.view(term.shape) for piece, term in zip(pieces, terms, strict=True)]
