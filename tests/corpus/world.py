"""One rank of a world without processes: decisions and messages are real, what peers send is made up.

The `fake` backend of torch answers for the others. Where it would leave memory unwritten, received numbers
are small and all different (a matrix of them can be inverted), and received integers are zero: an index is
valid. Nothing that a row says may depend on them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.testing.meshes import rank_mesh

AXES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp", "cp", "tp"), 4: ("pp", "dp", "cp", "tp")}
# Who speaks for a mesh: the first rank of the smallest, one in the middle or at the end of the others.
_RANKS = {(2,): 0, (3,): 1, (4,): 2, (6,): 4, (2, 2): 3, (2, 3): 4}
_kernels: list[torch.library.Library] = []


def rank_of(sizes: tuple[int, ...]) -> int:
    """The rank that speaks for a mesh of these sizes."""
    return _RANKS.get(sizes, prod(sizes) - 1)


@contextmanager
def world(sizes: tuple[int, ...]) -> Iterator[None]:
    """Be one rank of as many as a mesh of these sizes has; no sizes: be alone, without process groups."""
    if not sizes:
        yield
        return
    _answer_for_peers()
    dist.init_process_group("fake", store=FakeStore(), rank=rank_of(sizes), world_size=prod(sizes))
    rank_mesh.cache_clear()
    try:
        yield
    finally:
        rank_mesh.cache_clear()
        dist.destroy_process_group()


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    """The mesh over the whole world."""
    return rank_mesh(sizes, AXES[len(sizes)])


# ------------------------------------------------------------------------------------- what peers send


def _answer_for_peers() -> None:
    """Put kernels in the place of those that leave results unwritten, once per process."""
    if _kernels:
        return
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a kernel that is replaced
        library.impl("recv_", _receive, "CPU", allow_override=True)
        library.impl("alltoall_base_", _exchange, "CPU", allow_override=True)
        library.impl("broadcast_", _broadcast, "CPU", allow_override=True)
        library.impl("scatter_", _scatter, "CPU", allow_override=True)
    bounds = torch.library.Library("shardwright", "IMPL")
    bounds.impl("within", lambda *_: None, "CPU")  # what is made up may lie anywhere
    _kernels.extend((library, bounds))


def _receive(tensors: Sequence[torch.Tensor], group: Any, source: int, tag: int) -> Any:
    for x in tensors:
        _fill(x)
    return torch.ops.c10d.send(tensors, group, source, tag)


def _broadcast(tensors: Sequence[torch.Tensor], group: Any, root: int, *_: Any) -> Any:
    if dist.ProcessGroup.unbox(group).rank() != root:
        for x in tensors:
            _fill(x)
    return tensors, FakeWork().boxed()


def _scatter(tensors: Sequence[torch.Tensor], parts: Any, group: Any, root: int, *_: Any) -> Any:
    own = dist.ProcessGroup.unbox(group).rank()
    for index, x in enumerate(tensors):
        if own == root:
            x.copy_(parts[index][own])
        else:
            _fill(x)
    return tensors, FakeWork().boxed()


def _exchange(
    out: torch.Tensor, x: torch.Tensor, group: Any, out_splits: Sequence[int], in_splits: Sequence[int], *_
) -> Any:
    """What peers send: made up, or for integers (sizes, counts) what this rank sends, as far as it goes."""
    _fill(out)
    if not out.dtype.is_floating_point:
        rows = min(len(out), len(x))
        out[:rows].copy_(x[:rows])
    return torch.ops.c10d.send([out], group, 0, 0)


def _fill(x: torch.Tensor) -> None:
    if x.dtype.is_floating_point:
        x.copy_(torch.arange(1, x.numel() + 1).cos().view(x.shape))
    else:
        x.zero_()
