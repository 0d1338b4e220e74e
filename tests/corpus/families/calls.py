"""What programs write beside operators: factories, placing, random numbers, indexing, slices with writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.corpus.seen import seen
from tests.corpus.unit import Case, Sizes, Unit
from tests.corpus.world import mesh_of
from tests.views.placed import place
from tests.views.sweep import partitions

Call = Callable[[Tensor], Any]
_MESHES = ((2,), (2, 2))


def _written(change: Call) -> Call:
    """The tensor after a change in place."""

    def run(x: Tensor) -> Any:
        made = x.detach().clone()
        change(made)
        return made

    return run


def _set(index: Any, value: Any) -> Call:
    return _written(lambda x: x.__setitem__(index, value))


_ROWS = torch.tensor([4, 0, 2])
_MASK = torch.tensor([True, False, True, True, False, False])


def _in_spmd(x: Tensor) -> Any:
    with sw.spmd(x.device_mesh, check=False):
        return x * torch.ones(6, 1) + torch.arange(4.0), torch.zeros(3) + 1


def _explicit(x: Tensor) -> Any:
    with sw.explicit():
        return (x.relu() + 1).sum(0) * 2


def _stepped(x: Tensor, kind: Any, **options: Any) -> Any:
    leaf = torch.nn.Parameter(x.detach().clone())
    optimizer = kind([leaf], lr=0.1, **{"foreach": False, **options})
    (leaf.square().sum() * 2).backward()
    gradient = leaf.grad
    optimizer.step()
    return gradient, leaf, list(optimizer.state[leaf].values())


def _of(x: Tensor, whole: Tensor) -> Tensor:
    return sw.distribute_tensor(whole, x.device_mesh, src_data_rank=None)


ON_ONE: Mapping[str, Call] = {
    "full_tensor": lambda x: x.full_tensor(),
    "full_tensor, gradient": lambda x: torch.autograd.grad(x.full_tensor().square().sum(), x),
    "to_local": lambda x: x.to_local(),
    "redistribute by name": lambda x: x.redistribute({"tp": sw.Replicate()}),
    "x[2]": lambda x: x[2],
    "x[1:4]": lambda x: x[1:4],
    "x[..., 1]": lambda x: x[..., 1],
    "x[:, None, 1:3]": lambda x: x[:, None, 1:3],
    "x[rows]": lambda x: x[sw.distribute_tensor(_ROWS, x.device_mesh, src_data_rank=None)],
    "x[rows, rows]": lambda x: x[_of(x, _ROWS), _of(x, _ROWS) % 4],
    "x[:, rows]": lambda x: x[:, _of(x, _ROWS) % 4],
    "x[rows], gradient": lambda x: torch.autograd.grad(x[_of(x, _ROWS)].sum(), x),
    "x[[0, 3]]": lambda x: x[[0, 3]],
    "x[2] = 1": _set(2, 1.0),
    "x[1:4] = 0": _set(slice(1, 4), 0.0),
    "x[:, 1] = 2": _set((slice(None), 1), 2.0),
    "x[::2] = itself": _written(lambda x: x.__setitem__(slice(0, 3), x[3:6] * 2)),
    "x[rows] = 0": _written(lambda x: x.__setitem__(_of(x, _ROWS), 0.0)),
    "x[mask] = 0": _written(lambda x: x.__setitem__(_of(x, _MASK), 0.0)),
    "x[1:3].add_(1)": _written(lambda x: x[1:3].add_(1)),
    "x.t()[1].zero_()": _written(lambda x: x.t()[1].zero_()),
    "x.view(-1)[3:9].mul_(2)": _written(lambda x: x.view(-1)[3:9].mul_(2)),
    "x.add_(x.sum())": _written(lambda x: x.add_(x.sum())),
    "x.copy_(x.flip(0))": _written(lambda x: x.copy_(x.flip(0))),
    "index_copy": lambda x: x.index_copy(0, _of(x, _ROWS), x[:3]),
    "index_add": lambda x: x.index_add(0, _of(x, _ROWS), x[:3]),
    "item of a sum": lambda x: x.sum().item(),
    "bool of a comparison": lambda x: bool((x > 0).all()),
    "in a branch": lambda x: x * 2 if (x.sum() > 0) or True else x,
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "normal_": _written(lambda x: x.normal_()),
    "uniform_": _written(lambda x: x.uniform_()),
    "bernoulli": lambda x: x.sigmoid().bernoulli(),
    "multinomial": lambda x: x.abs().multinomial(2),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(3, 4),
    "new_full of its shape": lambda x: x.new_full(x.shape, 2.0),
    "detach, requires_grad_": lambda x: x.detach().requires_grad_(),
    "to float64": lambda x: x.to(torch.float64),
    "to bfloat16 and back": lambda x: x.to(torch.bfloat16).to(torch.float32),
    "clone": lambda x: x.clone(),
    "norm, clipped": lambda x: x / x.norm().clamp(min=1.0),
    "layer_norm, gradient": lambda x: torch.autograd.grad(
        torch.nn.functional.layer_norm(x, (4,)).square().sum(), x
    ),
    "softmax, gradient": lambda x: torch.autograd.grad(x.softmax(0).square().sum(), x),
    "mean, gradient": lambda x: torch.autograd.grad(x.mean(), x),
    "read three times": lambda x: (x.relu(), x.exp(), x.softmax(-1)),
    "terms added": lambda x: (x.sum(0) + x.sum(0) * 2).relu(),
    "matmul of itself": lambda x: x @ x.t(),
    "matmul, gradient": lambda x: torch.autograd.grad((x @ x.t()).square().sum(), x),
    "plain beside it": lambda x: x + torch.ones(4),
    "scalar beside it": lambda x: x + torch.tensor(2.0),
    "in spmd": _in_spmd,
    "explicit": _explicit,
    "cat with itself": lambda x: torch.cat([x, x]),
    "stack with a cut": lambda x: torch.stack([x, x * 2], 1),
    "sort": lambda x: x.sort(0),
    "topk": lambda x: x.topk(2, 0),
    "cumsum": lambda x: x.cumsum(0),
    "argmax": lambda x: x.argmax(0),
    "max, gradient": lambda x: torch.autograd.grad(x.amax(0).sum(), x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "SGD step": lambda x: _stepped(x, torch.optim.SGD, momentum=0.9),
    "AdamW step": lambda x: _stepped(x, torch.optim.AdamW),
    "AdamW step, foreach": lambda x: _stepped(x, torch.optim.AdamW, foreach=True),
}


# What makes distributed tensors from nothing, or from plain ones: of a mesh and placements.
MAKERS: Mapping[str, Callable[[DeviceMesh, Any], Any]] = {
    "zeros": lambda mesh, p: sw.zeros(6, 4, device_mesh=mesh, placements=p),
    "ones": lambda mesh, p: sw.ones((7, 3), device_mesh=mesh, placements=p),
    "empty": lambda mesh, p: sw.empty(6, 4, dtype=torch.bfloat16, device_mesh=mesh, placements=p),
    "full": lambda mesh, p: sw.full((5, 4), 2.0, device_mesh=mesh, placements=p),
    "rand": lambda mesh, p: sw.rand(6, 4, device_mesh=mesh, placements=p),
    "randn": lambda mesh, p: sw.randn(6, 4, device_mesh=mesh, placements=p),
    "distribute_tensor": lambda mesh, p: sw.distribute_tensor(torch.ones(7, 4), mesh, p),
    "distribute_tensor, transposed": lambda mesh, p: sw.distribute_tensor(torch.ones(7, 4).t(), mesh, p),
    "distribute_tensor, no source": lambda mesh, p: sw.distribute_tensor(
        torch.ones(7, 4), mesh, p, src_data_rank=None
    ),
    "from_local": lambda mesh, p: sw.DTensor.from_local(torch.ones(3, 4), mesh, p),
    "from_local, shape": lambda mesh, p: sw.DTensor.from_local(
        torch.ones(3, 4), mesh, p, shape=torch.Size((6, 4)), stride=(4, 1)
    ),
    "from_local, run_check": lambda mesh, p: sw.DTensor.from_local(torch.ones(3, 4), mesh, p, run_check=True),
}


def units() -> Iterator[Unit]:
    """One for each call."""
    for name in ON_ONE:
        yield Unit("calls", name, _MESHES, partial(_cases, name))
    for name in MAKERS:
        yield Unit("makers", name, _MESHES, partial(_makers, name))


def _placements(mesh: Sizes) -> list[tuple[sw.Placement, ...]]:
    pending = [sw.Partial(), sw.Partial("max"), sw.Partial("avg")]
    single = [sw.Replicate(), *pending, *partitions((6, 4), mesh[0])[2:16], sw.Owner(1)]
    if len(mesh) == 1:
        return [(p,) for p in single]
    return [(p, q) for p, q in zip(single, [*single[5:], *single[:5]], strict=True)]


def _cases(name: str, mesh: Sizes) -> Iterator[Case]:
    for placements in _placements(mesh):
        yield Case(f"{placements}", partial(seen, partial(_run, name, placements)))


def _run(name: str, placements: Any) -> Any:
    torch.manual_seed(3)
    x = place(torch.arange(24.0).view(6, 4) - 10, placements, None).detach().requires_grad_()
    return ON_ONE[name](x)


def _makers(name: str, mesh: Sizes) -> Iterator[Case]:
    for placements in _placements(mesh):
        yield Case(f"{placements}", partial(seen, partial(_made, name, mesh, placements)))


def _made(name: str, mesh: Sizes, placements: Any) -> Any:
    return MAKERS[name](mesh_of(mesh), placements)
