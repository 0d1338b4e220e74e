"""Stages on slices of a context's mesh, beside strategies that leave no parameter on one axis alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.context import REGULAR_DOMAIN, DeviceMeshParameters
from shardwright.grads import GradientSynchronizer
from shardwright.moe import MoELayer
from shardwright.parallel import (
    Pipeline,
    parallelize_batch_norm,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_pipeline,
    parallelize_replicate,
    parallelize_tensor,
)
from shardwright.testing import rank_mesh
from tests.moe.dense_loop import dense_loop

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


class _Head(nn.Linear):
    def forward(self, x):
        return super().forward(x), super().forward(x.detach())


def _two_stages(kind):
    torch.manual_seed(0)
    middle = {"experts": lambda: MoELayer(WIDTH, 16, 4, 2), "batch norm": lambda: nn.BatchNorm1d(WIDTH)}
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle[kind](), _Head(WIDTH, WIDTH)).double()


def _asked_by_some(kind):
    """The loss of one data rank reaches the first stage, that of the other one does not."""
    mesh = rank_mesh((2, 2), ("pp", "dp"))
    me, model, alone = mesh["dp"].get_local_rank(), _two_stages(kind), _two_stages(kind)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    if kind == "experts":
        alone[1].forward = lambda x: dense_loop(dict(alone[1].named_parameters()), x, 2)
        parallelize_expert_parallel(model, mesh["dp"], expert_shard_dim="dp")
    else:
        parallelize_batch_norm(model, mesh["dp"])
    parallelize_pipeline(model, mesh["pp"], ["2"])
    parallelize_replicate(model, mesh["dp"])
    pipeline = Pipeline(model, lambda out, _: out[me].square().sum(), micro_batches=1, schedule="gpipe")
    pipeline.step(x[2 * me : 2 * me + 2])
    GradientSynchronizer(model).synchronize()
    first, second = alone(x)
    (first[:2].square().sum() + second[2:].square().sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), alone.get_parameter(name).grad)


@pytest.mark.parametrize("kind", ["experts", "batch norm"])
def test_data_ranks_whose_loss_does_not_reach_a_stage_run_its_backward_with_the_others(ranks, kind):
    ranks(4, _asked_by_some, kind)
