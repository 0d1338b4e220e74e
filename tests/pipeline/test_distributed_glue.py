"""The model's own code computes with distributed tensors beside those that a stage has no values of."""

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.parallel import Pipeline, parallelize_context, parallelize_pipeline
from shardwright.testing import rank_mesh
from tests.pipeline.own_code import Base, H


class Skips(Base):
    """The first layers' results are added to what the last ones read."""

    def forward(self, x):
        kept = []
        for i, layer in enumerate(self.layers):
            x = layer(x if i < 2 else x + kept.pop() * 0.5)
            if i < 2:
                kept.append(x)
        return x


class Scales(Base):
    """Parameters of the model between its layers, each held by the stage of its layer or by both."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.mix = nn.ParameterList(nn.Parameter(torch.rand(H)) for _ in range(4))

    def forward(self, x):
        first = x
        for i, layer in enumerate(self.layers):
            x = self.scale[i] * layer(x * self.mix[i]) + 0.1 * first
        return x


class Adds(Base):
    """A term of the loss from what each layer has changed."""

    def forward(self, x):
        changes = x.new_zeros(())
        for layer in self.layers:
            x, before = layer(x), x
            changes = changes + (x - before).square().mean(-1).sum()
        return x, changes


MODELS = {
    "skips": (Skips, {}),
    "scales": (Scales, {"scale": (0, 1), **{f"mix.{i}": i // 2 for i in range(4)}}),
    "adds": (Adds, {}),
}


def _loss(out, target):
    x, more = out if isinstance(out, tuple) else (out, 0.0)
    return (x - target).square().sum() + more


def _as_on_one_device(name, how):
    torch.manual_seed(0)
    build, stages = MODELS[name]
    model = build().double()
    alone = copy.deepcopy(model)
    mesh = rank_mesh((2, 2), ("pp", "other"))
    if how == "tensor":
        sw.distribute_module(model, mesh["other"], {"layers.*.linear.weight": {"other": sw.Shard(1)}})
    else:
        parallelize_context(model, mesh["other"])
    parallelize_pipeline(model, mesh["pp"], ["layers.2"], stages=stages)
    pipeline = Pipeline(model, _loss, micro_batches=2)
    for length in (6, 5):
        x, target = torch.randn(4, length, H).double(), torch.randn(4, length, H).double()
        wanted = _loss(alone(x), target)
        wanted.backward()
        with sw.spmd(mesh["other"]):
            torch.testing.assert_close(pipeline.step(x, target=target), wanted.detach())
        for path, parameter in model.named_parameters():
            wanted = alone.get_parameter(path).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted, msg=path)


@pytest.mark.parametrize("how", ["tensor", "context"])
@pytest.mark.parametrize("name", MODELS)
def test_it_gives_what_one_device_gives(ranks, name, how):
    ranks(4, _as_on_one_device, name, how)
