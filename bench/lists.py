"""What lists of tensors cost on top of their kernels: optimizers, clipping, `_foreach_*`, beside torch's.

One process that believes to be rank 0 of 4 (the `fake` backend): nothing is sent and nobody is waited for.
Parameters have a few elements, so that what is measured is what stands around the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from bench.paired import HEADER_OVER_PLAIN, compare
from shardwright.testing.rank_device import device_of_ranks, here, take_device

_Step = Callable[[], object]
_Parameters = list[torch.nn.Parameter]


def _adamw(parameters: _Parameters, **how: bool) -> _Step:
    return torch.optim.AdamW(parameters, lr=1e-3, **how).step


def _sgd(parameters: _Parameters) -> _Step:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9).step


def _clip(parameters: _Parameters) -> _Step:
    return partial(torch.nn.utils.clip_grad_norm_, parameters, 1e9)


def _add(parameters: _Parameters) -> _Step:
    return partial(torch._foreach_add, [p.grad for p in parameters], 1.0)


def _add_in_place(parameters: _Parameters) -> _Step:
    grads = [p.grad for p in parameters]
    return partial(torch._foreach_add_, grads, grads, alpha=0.0)


_STEPS: dict[str, Callable[[_Parameters], _Step]] = {
    "AdamW, foreach": partial(_adamw, foreach=True),
    "AdamW, fused": partial(_adamw, fused=True),
    "SGD with momentum": _sgd,
    "clip_grad_norm_": _clip,
    "_foreach_add of a number": _add,
    "_foreach_add_ of a list": _add_in_place,
}


def run() -> None:
    """Print one line per step and number of parameters."""
    take_device(0)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    torch.set_num_threads(1)
    mesh = init_device_mesh(device_of_ranks(), (4,), mesh_dim_names=("dp",))
    print(HEADER_OVER_PLAIN)
    for count, calls in ((100, 10), (1500, 1)):
        for name, step in _STEPS.items():
            ours, peers = (step(_distributed(library, mesh, count)) for library in (sw, theirs))
            plain = step(_plain(count))
            for each in (ours, peers, plain):
                each()
            row = compare(f"{name}, {count}", ours, peers, plain=plain, calls=calls, turns=15)
            print(row.row(), flush=True)
    dist.destroy_process_group()


def _values(count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator(here()).manual_seed(0)
    made = [torch.randn((8, 8), generator=draw) for _ in range(2 * count)]
    return made[:count], made[count:]


def _plain(count: int) -> _Parameters:
    values, grads = _values(count)
    return _with_gradients([x[:2].clone() for x in values], [x[:2].clone() for x in grads])


def _distributed(library: ModuleType | Any, mesh: DeviceMesh, count: int) -> _Parameters:
    values, grads = _values(count)
    place = partial(library.distribute_tensor, device_mesh=mesh, placements=[library.Shard(0)])
    return _with_gradients(list(map(place, values)), list(map(place, grads)))


def _with_gradients(values: list[torch.Tensor], grads: list[torch.Tensor]) -> _Parameters:
    parameters = [torch.nn.Parameter(x) for x in values]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return parameters
