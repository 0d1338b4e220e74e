"""Sharded units of which each rank uses other parameters: branches, experts in a loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.errors import ParallelError, PlanError
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


def _overlap(model):
    with GradientSynchronizer(model).overlapped():
        pass


def _sharded(copies):
    """The model on two ranks, or twice on two, and which rows this rank reads."""
    model, one, rows = _made([0, 1])
    if copies:
        mesh = rank_mesh((2, 2), ("replicate", "shard"))
        parallelize_hsdp(model, mesh, shard_dim="shard")
    else:
        mesh = rank_mesh((2,), ("shard",))
        parallelize_fsdp(model, mesh)
    return model, one, rows, mesh.get_local_rank("shard")


def _refused_together(settle, copies) -> None:
    model, _, rows, at = _sharded(copies)
    for kind in (at, 1 - at):
        model(rows[at], kind).square().sum().backward()
    with pytest.raises(ParallelError, match=r"(?s)branches.0.weight.*set_reduce_scatter_unused_params"):
        settle(model)
    model.zero_grad()
    _right_together(model, rows[at])


def _right_together(model, x):
    """After an error, and with branches that all ranks take together, gradients are one device's."""
    one = Branches()
    one.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    everybody = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(everybody, x, group=model.head.weight.device_mesh.get_group("shard"))
    copies = dist.get_world_size() // 2
    for kind in (0, 1):
        model(x, kind).square().sum().backward()
        for each in everybody:
            (copies * one(each, kind).square().sum()).backward()
        GradientSynchronizer(model).synchronize()
    _same(model, one)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("settle", [_synchronize, _clip, _overlap])
def test_several_backwards_that_together_reach_all_are_refused(ranks, settle, copies):
    """Every rank has every gradient then, and none of them is right."""
    ranks(4 if copies else 2, _refused_together, settle, copies)


def _refused_while_it_goes_on() -> None:
    model, _, rows, at = _sharded(copies=True)
    with (
        pytest.raises(ParallelError, match=r"(?s)branches.0.weight.*set_reduce_scatter_unused_params"),
        GradientSynchronizer(model).overlapped(),
    ):
        model(rows[at], at).square().sum().backward()


def test_sums_that_travel_during_the_backward_are_refused(ranks):
    """What no rank of a copy reached has no term that could be seen."""
    ranks(4, _refused_while_it_goes_on)


def _kept() -> None:
    model, one, rows, at = _sharded(copies=False)
    model.set_requires_gradient_sync(False)
    model(rows[at], at).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model(rows[at], 1 - at).square().sum().backward()
    for x, kind in zip(rows, (1, 0), strict=True):
        one(x, kind).square().sum().backward()
    with sw.trace() as seen:
        GradientSynchronizer(model).synchronize()
    assert len(seen.collectives) == 1
    _same(model, one)


def test_backwards_that_are_sent_together_may_reach_parameters_in_any_order(ranks):
    """What is sent is what counts; nothing more is asked for it."""
    ranks(2, _kept)


def _guarded(rank_sees) -> None:
    model, _, rows = _made([0, 1])
    mesh = rank_mesh((2,), ("shard",))
    parallelize_fsdp(model, mesh)
    at = mesh.get_local_rank()
    with pytest.raises(PlanError, match=rank_sees), sw.guarded():
        sum(model(rows[at], kind).square().sum() for kind in range(at + 1)).backward()


def test_a_guard_names_gradients_of_other_sizes(ranks):
    """Without it the process ends inside of gloo."""
    ranks(2, _guarded, r"(?s)reduce_scatter torch.float32 .*reduce_scatter torch.float32 ")
