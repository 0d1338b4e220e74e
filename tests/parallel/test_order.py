"""Strategies in another order than the usual one: the same model, or a refusal before anything is changed."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import (
    parallelize_context,
    parallelize_fsdp,
    parallelize_hsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing.meshes import rank_mesh

from .residual import PLAN, check, one_device, residual, rows, run


def _mesh():
    return rank_mesh((2, 2), ("dp", "tp"))


def _three():
    return rank_mesh((2, 2, 1), ("cp", "dp", "tp"))


def _replicated_first():
    mesh = _mesh()
    model = residual()
    x, parts = rows((1, 3))
    wanted = one_device(model, x)
    usual = residual()
    sw.distribute_module(usual, mesh["tp"], PLAN)
    parallelize_replicate(usual, mesh["dp"])
    parallelize_replicate(model, mesh["dp"])
    sw.distribute_module(model, mesh["tp"], PLAN)
    for (name, p), q in zip(model.named_parameters(), usual.parameters(), strict=True):
        assert p._spec == q._spec, name

    def backward():
        with sw.spmd(mesh["tp"]):
            model(parts[mesh.get_local_rank("dp")]).square().sum().backward()

    run(model, backward, wanted)


def test_a_plan_after_replicate_is_the_plan_before_it(ranks):
    ranks(4, _replicated_first)


def _styles_after_replicate():
    mesh = _mesh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 3))
    x = torch.randn(4, 4)
    wanted = one_device(model, x)
    left = parallelize_replicate(model, mesh["dp"])[3].weight
    parallelize_tensor(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[3].weight is left
    mine = x.split((1, 3))[mesh.get_local_rank("dp")]
    run(model, lambda: model(mine).square().sum().backward(), wanted)
    return str(model[0].weight._spec.layout)


def test_torchs_styles_after_replicate(ranks):
    assert ranks(4, _styles_after_replicate) == ["f32[8@tp, 4]"] * 4


def _blocks_then_root():
    mesh = rank_mesh((2, 2), ("replicate", "shard"))
    model = residual()
    x, parts = rows((1, 0, 2, 1))
    wanted = one_device(model, x)
    for block in model.blocks:
        parallelize_hsdp(block, mesh, "shard")
    parallelize_hsdp(model, mesh, "shard")
    mine = parts[torch.distributed.get_rank()]
    for passes in (1, 2):
        for _ in range(passes):
            model(mine).square().sum().backward()
        GradientSynchronizer(model).synchronize()
        check(model, wanted, passes)
        model.zero_grad()


def test_hsdp_of_the_blocks_and_then_of_the_root(ranks):
    ranks(4, _blocks_then_root)


REFUSED = {
    "fsdp, replicate": (
        lambda m, mesh: parallelize_fsdp(m, mesh["dp"]),
        lambda m, mesh: parallelize_replicate(m, mesh["tp"]),
        "fully_shard manages this parameter on axis 'dp'",
    ),
    "fsdp, a plan": (
        lambda m, mesh: parallelize_fsdp(m, mesh["dp"]),
        lambda m, mesh: sw.distribute_module(m, mesh["tp"], {"0.weight": {"tp": sw.Shard(0)}}),
        "the plan places 0.weight, which is placed already (f32[4@dp, 4])",
    ),
    "fsdp, a plan of the same parts": (
        lambda m, mesh: parallelize_fsdp(m, mesh["dp"]),
        lambda m, mesh: sw.distribute_module(m, mesh["dp"], {"0.weight": {"dp": sw.Shard(0)}}),
        "the plan places 0.weight, which is placed already (f32[4@dp, 4])",
    ),
    "a plan over all ranks, context": (
        lambda m, mesh: sw.distribute_module(m, mesh["dp", "tp"]._flatten("dp_tp")),
        lambda m, mesh: parallelize_context(m, mesh["tp"]),
        "0.weight: it computes on ('dp_tp',), over the ranks of ('tp',) too",
    ),
    "context and data, words": (
        lambda m, _: parallelize_replicate(parallelize_context(m, _three()["cp"]), _three()["dp"]),
        lambda m, _: parallelize_tensor(m, _three()["tp"], {"0": "colwise"}),
        "parallelize_tensor: the plan places 0.weight, which is placed already (f32[4, 4])",
    ),
    "fsdp, words": (
        lambda m, mesh: parallelize_fsdp(m, mesh["dp"]),
        lambda m, mesh: parallelize_tensor(m, mesh["tp"], {"0": "colwise"}),
        "parallelize_tensor: the plan places 0.weight, which is placed already (f32[4@dp, 4])",
    ),
    "fsdp, placements": (
        lambda m, mesh: parallelize_fsdp(m, mesh["dp"]),
        lambda m, mesh: parallelize_tensor(m, mesh["tp"], {"0.weight": {"tp": sw.Shard(0)}}),
        "parallelize_tensor: the plan places 0.weight",
    ),
    "placements, placements": (
        lambda m, mesh: parallelize_tensor(m, mesh["tp"], {"0.weight": {"tp": sw.Shard(0)}}),
        lambda m, mesh: parallelize_tensor(m, mesh["dp"], {"0.bias": {"dp": sw.Shard(0)}}),
        "parallelize_tensor was already called on this module",
    ),
    "words, fsdp that keeps parts of a few ranks": (
        lambda m, _: parallelize_tensor(m, rank_mesh((4, 1), ("dp", "tp"))["tp"], {"0": "colwise"}),
        lambda m, _: parallelize_fsdp(m, rank_mesh((4, 1), ("dp", "tp"))["dp"], reshard_after_forward=2),
        "0.weight: it computes as a DTensor on ('tp',), and between forward and backward",
    ),
    "fsdp, styles": (
        lambda m, mesh: parallelize_fsdp(m, mesh["dp"]),
        lambda m, mesh: parallelize_tensor(m, mesh["tp"], {"0": ColwiseParallel()}),
        "0.weight is placed already (f32[4@dp, 4]), so ColwiseParallel cannot cut it",
    ),
    "fsdp of a part, fsdp on another axis": (
        lambda m, mesh: parallelize_fsdp(m[0], mesh["dp"]),
        lambda m, mesh: parallelize_fsdp(m, mesh["tp"]),
        "it belongs to a sharded unit on axis 'dp' already",
    ),
    "fsdp of a part, hsdp": (
        lambda m, mesh: parallelize_fsdp(m[0], mesh["tp"]),
        lambda m, mesh: parallelize_hsdp(m, mesh, "tp"),
        "without axis 'dp'",
    ),
    "fsdp of a part, fsdp on two axes": (
        lambda m, mesh: parallelize_fsdp(m[0], mesh["tp"]),
        parallelize_fsdp,
        "without axis 'dp'",
    ),
    "a plan, another plan": (
        lambda m, mesh: sw.distribute_module(m[0], mesh["tp"], {"weight": {"tp": sw.Shard(0)}}),
        lambda m, mesh: sw.distribute_module(m, mesh["tp"], {"0.weight": {"tp": sw.Shard(1)}}),
        "the plan places 0.weight, which is placed already (f32[4@tp, 4])",
    ),
}


def _refused(name):
    first, second, _ = REFUSED[name]
    mesh = _mesh()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first(model, mesh)
    classes = [type(child) for child in model.modules()]
    before = dict(model.named_parameters())
    with pytest.raises(ParallelError) as caught:
        second(model, mesh)
    after = dict(model.named_parameters())
    assert [type(child) for child in model.modules()] == classes
    assert all(after[key] is before[key] for key in before)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_in_this_order_is_refused(ranks, name):
    for text in ranks(4, _refused, name):
        assert REFUSED[name][2] in text
