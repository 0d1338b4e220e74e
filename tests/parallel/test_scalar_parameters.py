"""A parameter without dims, which cannot be cut, is replicated where others are."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from shardwright.testing import rank_mesh


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.inner(x) * self.scale


class Nested(nn.Module):
    """A scalar in a block that is a unit of its own, one beside it, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), Scaled()])
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) + self.shift * self.fixed
        return x


def _step(model, optimizer, x):
    model(x).square().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    return {"norm": norm, **grads, **{f"{n} after": p.detach() for n, p in model.named_parameters()}}


def _same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        full = got[name].full_tensor() if isinstance(got[name], sw.DTensor) else got[name]
        torch.testing.assert_close(full, value, msg=lambda text, name=name: f"{name}: {text}")


def _fsdp(place, sizes, axes) -> None:
    torch.manual_seed(0)
    mesh, model = rank_mesh(sizes, axes), Nested()
    x = torch.randn(dist.get_world_size(), 3, 4)
    one = copy.deepcopy(model)
    wanted = _step(one, torch.optim.SGD(one.parameters(), 0.01), x)
    for block in model.blocks:
        place(block, mesh)
    place(model, mesh)
    assert all(axes[sizes[-1] > 1 and -1] in p.device_mesh.mesh_dim_names for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    _same(_step(model, optimizer, x[dist.get_rank()]), wanted)
    state = {n: p.full_tensor() for n, p in model.state_dict().items()}
    _same(state, {n: p.detach() for n, p in one.named_parameters()})
    with pytest.raises(ParallelError, match="already"):
        place(model, mesh)


def test_fsdp_replicates_a_scalar(ranks):
    """`fully_shard` alone takes none; CLIP and SigLIP have one."""
    ranks(2, _fsdp, parallelize_fsdp, (2,), ("shard",))


def test_a_scalar_lives_on_the_axes_that_its_unit_is_replicated_on_too(ranks):
    ranks(4, _fsdp, partial(parallelize_hsdp, shard_dim="shard"), (2, 2), ("rep", "shard"))
    ranks(4, _fsdp, parallelize_fsdp, (2, 2), ("rep", "shard"))
    ranks(2, _fsdp, parallelize_fsdp, (2, 1), ("rep", "shard"))  # a scalar lives on `rep` alone then


def _replicate() -> None:
    torch.manual_seed(0)
    model, x = Scaled(), torch.ones(2, 4)
    model(2 * x).sum().backward()
    wanted = model.scale.grad.clone()
    model.zero_grad()
    parallelize_replicate(model, rank_mesh((2,), ("dp",)))
    model(2 * x).sum().backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), 2 * wanted)


def test_replicate_takes_a_scalar(ranks):
    ranks(2, _replicate)
