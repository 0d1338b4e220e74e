"""Sequence parallelism beside data: what a norm's tokens leave of its gradient is summed with the rest."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_replicate, parallelize_tensor
from shardwright.testing import rank_mesh
from tests.witness.witness import Witness


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.LayerNorm(8), nn.ModuleList(_Block() for _ in range(3))
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x)).square().sum()


PLAN = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}


def _step(data):
    """The messages of a backward, where the norms' gradients lie after it, and what is wrong at the end."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    model = _Model()
    if data == "replicate before":
        parallelize_replicate(model, mesh["dp"])
    parallelize_tensor(model, mesh["tp"], PLAN, sequence_parallel=True)
    if data == "replicate":
        parallelize_replicate(model, mesh["dp"])
    elif data == "fsdp":
        for block in model.blocks:
            parallelize_fsdp(block, mesh["dp"])
        parallelize_fsdp(model, mesh["dp"])
    x, one = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1)), _Model()
    one(x).backward()
    mine = x[mesh.get_local_rank("dp")][None] if data else x
    with sw.spmd(mesh["tp"]):
        loss = model(mine)
        with Witness() as backward:
            loss.backward()
    lie = {p.grad.placements[-1] for n, p in model.named_parameters() if "norm" in n}
    GradientSynchronizer(model).synchronize()
    wrong = [
        name
        for name, p in model.named_parameters()
        if not torch.allclose(p.grad.full_tensor(), one.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    ]
    return len(backward.asked), lie, wrong


@pytest.mark.parametrize("data", ["replicate", "replicate before", "fsdp"])
def test_a_backward_sends_nothing_for_each_norm(ranks, data):
    alone, _, wrong = ranks(4, _step, "")[0]
    assert wrong == []
    sent, lie, wrong = ranks(4, _step, data)[0]
    units = 4 + 3 if data == "fsdp" else 0  # each scatters its sums, and gathers, but for the root
    assert (sent, lie, wrong) == (alone + units, {sw.Partial("sum")}, [])
