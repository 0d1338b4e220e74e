"""A backward that is taken apart finds every gradient, whatever way a weight goes through its stage."""

import copy

import pytest
import torch
from torch import nn

from shardwright.parallel import Pipeline, parallelize_pipeline
from shardwright.parallel.pipeline.stage import _nodes, meet_once
from shardwright.testing import rank_mesh
from tests.pipeline.own_code import Base, H, Part, Stops


class Crosses(Part):
    """Two streams in, what meets of them out."""

    def forward(self, x, memory):
        return super().forward(x) * torch.sigmoid(memory)


class OwnStream(Base):
    """A later stage begins a stream of its own, as a decoder does, which leaves beside all that arrived."""

    def __init__(self):
        super().__init__()
        self.layers[3] = Crosses()

    def forward(self, x):
        memory = self.layers[1](self.layers[0](x))
        started = self.layers[2](x.flip(-1))
        return self.layers[3](started, memory) + started


class SeveralPlaces(Base):
    """A parameter of the model meets each layer: several places in each stage."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = self.scale[i] * layer(x * self.scale[i])
        return x


class Twice(Base):
    """Each layer is called twice."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(layer(x))
        return x


MODELS = {
    "detached": (Stops, {}),
    "own stream": (OwnStream, {}),
    "several places": (SeveralPlaces, {"scale": (0, 1, 2, 3)}),
    "twice": (Twice, {}),
}


def _loss(out, target):
    return (out - target).square().sum()


def _as_on_one_device(name):
    torch.manual_seed(0)
    build, stages = MODELS[name]
    model = build().double()
    alone = copy.deepcopy(model)
    parallelize_pipeline(model, rank_mesh((2,), ("pp",)), ["layers.1", "layers.2", "layers.3"], stages=stages)
    pipeline = Pipeline(model, _loss, micro_batches=4, schedule="interleaved_zero_bubble")
    for _ in range(2):
        x, target = torch.randn(8, H).double(), torch.randn(8, H).double()
        _loss(alone(x), target).backward()
        pipeline.step(x, target=target)
        for path, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, alone.get_parameter(path).grad, msg=path)


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_found(ranks, name):
    ranks(2, _as_on_one_device, name)


def _chain(x, a, b):
    return (x @ a).tanh() @ b


def _beside(x, a, b):
    return x + torch.relu(a) @ b


def _returned(x, a, b):
    return [x @ b, a.tanh()]


def _twice(x, a, b):
    return (x @ a) @ a + b


def _shares_a_node(x, a, b):
    return x @ (a @ b)


def _reads_one(x, a, b):
    return x @ a


@pytest.mark.parametrize(
    ("build", "once"),
    [
        (_chain, True),
        (_beside, True),
        (_shares_a_node, True),
        (_reads_one, True),
        (_returned, False),
        (_twice, False),
    ],
)
def test_a_graph_says_whether_each_weight_meets_what_arrived_once(build, once):
    x, a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    outputs = build(x, a, b)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    assert meet_once(_nodes(outputs), _nodes([x]), _nodes([a, b])) is once
