"""Inference before, between and after training steps leaves no tensor that a step may not write."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp
from shardwright.testing.meshes import rank_mesh

X = torch.linspace(-1, 1, 32).view(4, 8)
PLAN = {"0.weight": {"tp": sw.Shard(0)}, "2.weight": {"tp": sw.Shard(1)}}
MESHES = {
    "fsdp": ((4,), ("dp_cp_shard",)),
    "hsdp": ((2, 2), ("dp_replicate", "dp_cp_shard")),
    "tensor and fsdp": ((2, 2), ("dp_cp_shard", "tp")),
}


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _placed(strategy, *, units):
    mesh = rank_mesh(*MESHES[strategy])
    model = _net()
    if strategy == "tensor and fsdp":
        sw.distribute_module(model, mesh["tp"], PLAN)
        mesh = mesh["dp_cp_shard"]
    shard = parallelize_hsdp if strategy == "hsdp" else parallelize_fsdp
    if units:
        shard(model[0], mesh)
    return shard(model, mesh)


def _trained(strategy):
    plain = _net()
    plain(X).square().sum().backward()
    for units in (False, True):
        model = _placed(strategy, units=units)
        tp = rank_mesh(*MESHES[strategy])["tp"] if "tensor" in strategy else None
        copies = 2 if tp is not None else 4  # of the batch

        def forward(model=model, tp=tp):
            if tp is None:
                return model(X)
            with sw.spmd(tp):
                out = model(X)
            return out.full_tensor() if isinstance(out, sw.DTensor) else out

        for _ in range(2):
            with torch.inference_mode():
                torch.testing.assert_close(forward(), plain(X))
            model.zero_grad()
            (forward().square().sum() / copies).backward()
            GradientSynchronizer(model).synchronize()
            for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)


@pytest.mark.parametrize("strategy", MESHES)
def test_training_after_inference(ranks, strategy):
    ranks(4, _trained, strategy)
