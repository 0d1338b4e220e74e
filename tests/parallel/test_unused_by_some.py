"""Sharded units of which each rank uses other parameters: branches, experts in a loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp, parallelize_tensor
from shardwright.testing import rank_mesh


class Branches(nn.Module):
    """Two branches, one for each kind of rows, and a part that nobody uses."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, kind):
        return self.head(self.branches[kind](x))


def _made(kinds):
    torch.manual_seed(0)
    model, rows = Branches(), torch.randn(len(kinds), 3, 4)
    one = copy.deepcopy(model)
    for x, kind in zip(rows, kinds, strict=True):
        one(x, kind).square().sum().backward()
    return model, one, rows


def _same(model, one):
    norm = clip_grad_norm_(model, 1.0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 1.0))
    for name, parameter in model.named_parameters():
        wanted = one.get_parameter(name).grad
        if wanted is None:
            assert parameter.grad is None or not parameter.grad.full_tensor().any()
        else:
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted, msg=name)


def _refused(settle) -> None:
    model, _, rows = _made([0, 1])
    mesh = rank_mesh((2,), ("shard",))
    parallelize_fsdp(model, mesh)
    at = mesh.get_local_rank()
    model(rows[at], at).square().sum().backward()
    with pytest.raises(ParallelError, match=r"(?s)branches.0.weight.*set_reduce_scatter_unused_params"):
        settle(model)


def _synchronize(model):
    GradientSynchronizer(model).synchronize()


def _clip(model):
    clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("settle", [_synchronize, _clip])
def test_sums_of_different_parameters_are_refused(ranks, settle):
    """fully_shard adds them where their sizes are the same, and nobody sees it."""
    ranks(2, _refused, settle)


def _as_told(tensor) -> None:
    model, one, rows = _made([0, 1])
    mesh = rank_mesh((2, 2), ("shard", "tp")) if tensor else rank_mesh((2,), ("shard",))
    if tensor:
        parallelize_tensor(model, mesh["tp"], {"branches.*.weight": {"tp": sw.Shard(0)}})
    parallelize_fsdp(model, mesh["shard"])
    model.set_reduce_scatter_unused_params(True)
    at = mesh.get_local_rank("shard")
    if tensor:
        with sw.spmd(mesh["tp"]):
            model(rows[at], at).square().sum().backward()
    else:
        model(rows[at], at).square().sum().backward()
    GradientSynchronizer(model).synchronize()
    _same(model, one)


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13"
)
@pytest.mark.parametrize("tensor", [False, True])
def test_the_way_out_gives_the_gradients_of_one_device(ranks, tensor):
    """What the error names."""
    ranks(4 if tensor else 2, _as_told, tensor)


def _copies() -> None:
    model, one, rows = _made([0, 1, 0, 1])
    mesh = rank_mesh((2, 2), ("replicate", "shard"))
    parallelize_hsdp(model, mesh, shard_dim="shard")
    at = mesh.get_local_rank("replicate")
    mine = rows[at] if mesh.get_local_rank("shard") == 0 else rows[at + 2]
    model(mine, at).square().sum().backward()
    GradientSynchronizer(model).synchronize()
    _same(model, one)


def test_copies_of_a_unit_may_use_other_parameters(ranks):
    """Their gradients are summed one by one."""
    ranks(4, _copies)
