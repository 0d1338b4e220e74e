"""What one op costs on top of its kernel: our dispatch beside torch's, on tensors of a few elements.

One process that believes to be rank 0 of 4 (the `fake` backend), so nothing is sent and nobody is waited for:
no op here needs communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name in every program
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from bench.paired import HEADER_OVER_PLAIN, Comparison, compare
from shardwright.testing.rank_device import device_of_ranks, take_device

_Op = Callable[..., object]
_VECTOR = -2  # of one dim, whole; -1: a whole square
_OPS: dict[str, tuple[_Op, tuple[int, ...]]] = {
    "x + y, rows cut": (torch.add, (0, 0)),
    "x * y, columns cut": (torch.mul, (1, 1)),
    "x @ y, rows of x cut": (torch.mm, (0, -1)),
    "x @ y, inner dim cut": (torch.mm, (1, 0)),
    "relu": (torch.relu, (0,)),
    "sum over the cut dim": (lambda x: torch.sum(x, 0), (0,)),
    "softmax over a whole dim": (lambda x: torch.softmax(x, 1), (0,)),
    "view that splits a dim": (lambda x: x.view(-1, 4, 2), (0,)),
    "transpose": (lambda x: x.t(), (0,)),
    "slice of a whole dim": (lambda x: x[:, 2:6], (0,)),
    "detach": (lambda x: x.detach(), (0,)),
    "x * 2.0": (lambda x: x * 2.0, (0,)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (0, _VECTOR, _VECTOR)),
    "linear": (F.linear, (0, -1, _VECTOR)),
    "mean over a whole dim": (lambda x: x.mean(-1), (0,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), (0, _VECTOR)),
    "cat along a whole dim": (lambda x, y: torch.cat([x, y], 1), (0, 0)),
    "split of a whole dim": (lambda x: x.split(4, 1), (0,)),
    "add with alpha=2": (lambda x, y: torch.add(x, y, alpha=2), (0, 0)),
    "x.add_(y)": (lambda x, y: x.add_(y), (0, 0)),
    "x.copy_(y)": (lambda x, y: x.copy_(y), (0, 0)),
}


def run() -> None:
    """Print one line per op, without gradients and with."""
    take_device(0)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    torch.set_num_threads(1)
    print(HEADER_OVER_PLAIN)
    for name, (op, dims) in _OPS.items():
        print(_compare(name, op, dims).row(), flush=True)
    print(_compare("x @ y, forward and backward", _with_backward, (0, -1), grad=True).row())
    for comparison in (*_unmoved(), *_in_and_out()):
        print(comparison.row(), flush=True)
    dist.destroy_process_group()


def _compare(name: str, op: _Op, dims: tuple[int, ...], *, grad: bool = False) -> Comparison:
    mesh = init_device_mesh(device_of_ranks(), (4,), mesh_dim_names=("tp",))
    full = [torch.randn((8,) if dim == _VECTOR else (8, 8), requires_grad=grad) for dim in dims]
    ours, peers = (
        [
            library.distribute_tensor(x, mesh, [_placed(library, dim)], src_data_rank=None)
            for x, dim in zip(full, dims, strict=True)
        ]
        for library in (sw, theirs)
    )
    _check_same(op(*ours), op(*peers))
    plain = [x.to_local() for x in peers]
    below = None if grad else lambda: op(*plain)
    return compare(name, lambda: op(*ours), lambda: op(*peers), plain=below)


def _unmoved() -> Iterator[Comparison]:
    """A redistribution to the own layout; torch takes no mapping, and is given a list both times."""
    mesh = init_device_mesh(device_of_ranks(), (4,), mesh_dim_names=("tp",))
    for grad in (False, True):
        full = torch.randn(8, 8, requires_grad=grad)
        ours, peer = (library.distribute_tensor(full, mesh, [library.Shard(0)]) for library in (sw, theirs))
        after = ", with gradient" if grad else ""
        at_peer = partial(peer.redistribute, mesh, [theirs.Shard(0)])
        by_list = partial(ours.redistribute, mesh, [sw.Shard(0)])
        by_name = partial(ours.redistribute, {"tp": sw.Shard(0)})
        yield compare(f"redistribute, nothing moves{after}", by_list, at_peer, calls=300)
        yield compare(f"the same, placements by name{after}", by_name, at_peer, calls=300)


def _in_and_out() -> Iterator[Comparison]:
    """From local tensors and back."""
    mesh = init_device_mesh(device_of_ranks(), (4,), mesh_dim_names=("tp",))
    for grad in (False, True):
        full, local = (torch.randn(size, 8, requires_grad=grad) for size in (8, 2))
        ours, peer = (library.distribute_tensor(full, mesh, [library.Shard(0)]) for library in (sw, theirs))
        into, at_peer = (
            partial(library.DTensor.from_local, local, mesh, [library.Shard(0)]) for library in (sw, theirs)
        )
        after = ", with gradient" if grad else ""
        yield compare(f"from_local{after}", into, at_peer, calls=300)
        yield compare(f"to_local{after}", ours.to_local, peer.to_local, calls=300)


def _placed(library: object, dim: int) -> object:
    return library.Replicate() if dim < 0 else library.Shard(dim)  # type: ignore[attr-defined]


def _check_same(ours: object, peer: object) -> None:
    if isinstance(ours, torch.Tensor) and isinstance(peer, torch.Tensor):
        assert torch.equal(ours.to_local(), peer.to_local())  # type: ignore[attr-defined]


def _with_backward(x: torch.Tensor, y: torch.Tensor) -> None:
    (x @ y).to_local().sum().backward()  # type: ignore[attr-defined]
