"""The start of a model that fits on no rank: made on the meta device, placed, emptied, filled, trained."""

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import (
    ToLocalParallel,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing.meshes import rank_mesh
from shardwright.testing.rank_device import here

from .residual import PLAN, Model, check, one_device, residual, rows

STYLES = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def _to_local(model, mesh):
    style = ToLocalParallel(sw.Replicate(), sw.Partial("sum"))
    return style._apply(model, mesh)


def _cut(model, mesh):
    return sw.distribute_module(model, mesh, PLAN)


def _cut_and(data):
    return lambda model, mesh: data(_cut(model, mesh["tp"]), mesh["dp"])


PLACED = {
    "replicate": parallelize_replicate,
    "to local": _to_local,
    "fsdp": lambda model, mesh: parallelize_fsdp(model, mesh["tp"]),
    "hsdp": lambda model, mesh: parallelize_hsdp(model, mesh, "tp"),
    "cut": lambda model, mesh: _cut(model, mesh["tp"]),
    "styles": lambda model, mesh: parallelize_tensor(model, mesh["tp"], STYLES),
    "cut, replicate": _cut_and(parallelize_replicate),
    "cut, fsdp": _cut_and(parallelize_fsdp),
}
DATA_AXES = {
    "replicate": ("dp", "tp"),
    "to local": ("dp", "tp"),
    "fsdp": ("tp",),
    "hsdp": ("dp", "tp"),
    "cut, replicate": ("dp",),
    "cut, fsdp": ("dp",),
}


def _coord(mesh, axes):
    index = 0
    for axis in axes:
        index = index * mesh[axis].size() + mesh.get_local_rank(axis)
    return index


def _start(name):
    mesh = rank_mesh((1, 2), ("dp", "tp"))
    full = residual()
    with torch.device("meta"):
        model = Model()
    names = list(model.state_dict())
    PLACED[name](model, mesh)
    assert all(t.is_meta for t in model.state_dict().values())
    model.to_empty(device=here())
    assert list(model.state_dict()) == names
    with torch.no_grad():
        for key, p in model.named_parameters():
            value = full.get_parameter(key)
            if isinstance(p, sw.DTensor):
                order = p._spec.layout.order_names
                p.copy_(sw.distribute_tensor(value.detach(), p.device_mesh, p.placements, order=order))
            else:
                p.copy_(value)
    axes = DATA_AXES.get(name, ())
    members = 2 if "tp" in axes else 1
    x, parts = rows((1, 3) if members == 2 else (4,))
    mine = parts[_coord(mesh, axes)]
    if "cut" in name:
        with sw.spmd(mesh["tp"]):
            model(mine).square().sum().backward()
    else:
        model(mine).square().sum().backward()
    if name == "styles":
        wanted = one_device(full, x)
        for key, p in model.named_parameters():
            if wanted[key] is not None:
                got = p.grad.full_tensor() if isinstance(p.grad, sw.DTensor) else p.grad
                torch.testing.assert_close(got, wanted[key], rtol=1e-4, atol=1e-4)
        return
    GradientSynchronizer(model).synchronize()
    check(model, one_device(full, x))


@pytest.mark.parametrize("name", PLACED)
def test_a_model_placed_on_the_meta_device_trains_as_one_device(ranks, name):
    ranks(2, _start, name)


def _one_tensor():
    mesh = rank_mesh((2,), ("tp",))
    made = sw.distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [sw.Shard(0)])
    filled = torch.empty_like(made, device="cpu").fill_(2.0)
    with sw.trace() as t:
        sw.distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [sw.Shard(0)])
    return made.is_meta, tuple(made.to_local().shape), filled.full_tensor().sum().item(), len(t.collectives)


def test_a_meta_tensor_is_cut_without_communication(ranks):
    assert ranks(2, _one_tensor) == [(True, (3, 3), 30.0, 0), (True, (2, 3), 30.0, 0)]
