"""Strategies that are about some layers, after a cut that left all of these to one stage."""

import copy

import pytest
import torch
from torch import nn

from shardwright.context import DeviceMeshParameters
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.moe import MoELayer
from shardwright.parallel import (
    Pipeline,
    parallelize,
    parallelize_batch_norm,
    parallelize_expert_parallel,
    parallelize_fsdp,
    parallelize_pipeline,
)
from tests.pipeline.own_code import Base, H, Part, total


class Uneven(Base):
    """Norms in the first stage only, experts in the second only."""

    def __init__(self):
        super().__init__()
        self.layers[0] = nn.Sequential(Part(), nn.BatchNorm1d(H))
        self.layers[2] = MoELayer(H, 12, num_experts=4, top_k=2)


def _context():
    degrees = {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2}
    return DeviceMeshParameters(**degrees).build(device="cpu")


def _place(model, context, how):
    parallelize_pipeline(model, context.mesh_for("regular")["pp"], ["layers.2"])
    if how == "table":
        rows = {"": ["expert", "batch_norm", "fsdp"], "layers.*": "fsdp", "layers.0.0.linear": "fsdp"}
        parallelize(model, context, rows, report=None)
        return
    data = context.mesh_for("dense")["dp_cp_shard"]
    parallelize_expert_parallel(model.layers[2], context.mesh_for("expert")[["ep_replicate", "ep_shard"]])
    parallelize_batch_norm(model.layers[0], data)
    for layer in model.layers:
        parallelize_fsdp(layer, data)
    parallelize_fsdp(model, data)


def _trained(how):
    context = _context()
    torch.manual_seed(0)
    model, x = Uneven(), torch.randn(2, 2, 3, H)  # [ranks, micro-batches, rows, features]
    alone = copy.deepcopy(model)
    wanted = sum(total(alone(x[:, micro].flatten(0, 1)), None) for micro in range(2)) / 12
    wanted.backward()
    _place(model, context, how)
    dp = context.mesh_for("batch")["dp"]
    pipeline = Pipeline(model, total, micro_batches=2, data=dp)
    loss = pipeline.step(x[dp.get_local_rank()].flatten(0, 1), count=torch.tensor(6))
    torch.testing.assert_close(loss, wanted.detach())
    GradientSynchronizer(model).synchronize()
    norm = clip_grad_norm_(model, 1e-2)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 1e-2))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad, msg=name)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, alone.get_buffer(name), msg=name)
    context.close()


@pytest.mark.parametrize("how", ["calls", "table"])
def test_a_stage_without_experts_or_norms_is_one_device(ranks, how):
    """Every rank makes the same calls; what they are about may all be elsewhere."""
    ranks(4, _trained, how)


def _without_any():
    context = _context()
    meshes = context.mesh_for("expert")[["ep_replicate", "ep_shard"]], context.mesh_for("batch")["dp"]
    for place, mesh in zip((parallelize_expert_parallel, parallelize_batch_norm), meshes, strict=True):
        with pytest.raises(ParallelError, match="inside Base"):
            place(Base(), mesh)
    context.close()


def test_a_whole_model_without_them_is_refused(ranks):
    ranks(4, _without_any)
