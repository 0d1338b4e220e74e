"""Shapes that come for the first time, on all data ranks or on some, while gradients of earlier steps wait."""

import copy

import pytest
import torch
from torch import nn

from shardwright.parallel import Pipeline, parallelize_fsdp, parallelize_pipeline
from shardwright.testing import rank_mesh
from tests.pipeline.ranks import error, whole

WIDTH = 4


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu() + x
        return x


def _summed(out, _=None):
    return out.square().sum()


def _worst(batches, look, knows_data):
    """The largest error of a gradient after several steps; batches: the rows of both data ranks, by step."""
    torch.manual_seed(0)
    model = _Layers()
    alone, mesh = copy.deepcopy(model), rank_mesh((2, 2), ("pp", "dp"))
    parallelize_pipeline(model, mesh["pp"], ["layers.2"])
    for layer in model.layers:
        if any(True for _ in layer.parameters()):
            parallelize_fsdp(layer, mesh["dp"])
    parallelize_fsdp(model, mesh["dp"])
    pipeline = Pipeline(model, _summed, micro_batches=2, data=mesh["dp"] if knows_data else None)
    for seed, rows in enumerate(batches):
        x = torch.randn(sum(rows), WIDTH, generator=torch.Generator().manual_seed(seed))
        if look:
            pipeline.evaluate(x)
        _summed(alone(x)).backward()
        pipeline.step(x.split(rows)[mesh["dp"].get_local_rank()])
    return max(error(whole(p.grad), alone.get_parameter(n).grad) for n, p in model.named_parameters())


@pytest.mark.parametrize("look", [False, True])
def test_gradients_of_sharded_stages_stay_where_new_shapes_come(ranks, look):
    assert max(ranks(4, _worst, [(2, 2), (4, 4), (2, 2)], look, True, timeout=30)) < 1e-5
