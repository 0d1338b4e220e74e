"""Stages on slices of a context's mesh, beside strategies that leave no parameter on one axis alone."""

import copy

import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.context import REGULAR_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import Pipeline, parallelize_fsdp, parallelize_pipeline, parallelize_tensor

WIDTH = 8


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(x)))


def _loss(out, target):
    return (out - target).square().sum()


def _step():
    degrees = {"pipeline_parallel": 2, "data_parallel_shard": 2, "tensor_parallel": 2}
    mesh = DeviceMeshParameters(**degrees).build().mesh_for(REGULAR_DOMAIN)
    torch.manual_seed(0)
    alone = nn.Sequential(_Block(), _Block())
    model = copy.deepcopy(alone)
    parallelize_tensor(model, mesh["tp"], {"*.up": "colwise", "*.down": "rowwise"})
    parallelize_pipeline(model, mesh["pp"], ["1"])
    parallelize_fsdp(model, mesh["dp_shard"])
    x, target = torch.randn(2, 8, WIDTH)
    wanted = _loss(alone(x), target) / x.numel()
    wanted.backward()
    mine = slice(4 * mesh["dp_shard"].get_local_rank(), 4 * mesh["dp_shard"].get_local_rank() + 4)
    pipeline = Pipeline(model, _loss, micro_batches=2, data=mesh["dp_shard"])
    with sw.spmd(mesh["tp"]):
        found = pipeline.step(x[mine], target=target[mine], count=x[mine].numel())
    GradientSynchronizer(model).synchronize()
    torch.testing.assert_close(found, wanted.detach())
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), gradients[name])


def test_what_crosses_a_border_is_on_a_slice_of_a_parameters_mesh(ranks):
    """Every parameter is on the axes of FSDP and of tensor parallelism together."""
    ranks(8, _step)
