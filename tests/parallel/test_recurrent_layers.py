"""Recurrent layers in sharded units: on CUDA they move their weights, and are followed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp
from shardwright.testing import rank_mesh


def _as_on_cuda(layer):
    """What `flatten_parameters` does there: the weights point into memory of the layer's own."""

    def flatten_parameters(self):
        for weight in self._flat_weights:
            if type(weight) is nn.Parameter:
                weight.data = weight.data.clone()

    return type(f"{layer.__name__}OnCuda", (layer,), {"flatten_parameters": flatten_parameters})


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first = layer(4, 6)
        self.second = layer(6, 5, bidirectional=True)

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


def _steps(model, x, after):
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for _ in range(4):
        loss = model(x).square().sum() / 12
        loss.backward()
        after()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def _beside(layer, strategy, reshard):
    torch.manual_seed(0)
    alone = Model(getattr(nn, layer))
    model = Model(_as_on_cuda(getattr(nn, layer)))
    model.load_state_dict(copy.deepcopy(alone.state_dict()))
    x, rank = torch.randn(3, 4, 4), torch.distributed.get_rank()
    wanted = _steps(alone, x, lambda: None)
    if strategy == "fsdp":
        mesh = rank_mesh((2,), ("dp",))
        for unit in (model.first, model.second, model):
            parallelize_fsdp(unit, mesh, reshard_after_forward=reshard)
    else:
        mesh = rank_mesh((1, 2), ("outer", "dp"))
        parallelize_hsdp(model, mesh, "dp", reshard_after_forward=reshard)
    rows = x.chunk(2, 1)[rank]
    losses = _steps(model, rows, GradientSynchronizer(model).synchronize)
    torch.distributed.all_reduce(losses)
    torch.testing.assert_close(losses, wanted)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_weights_that_a_layer_moves_are_gathered_anew(ranks, layer, strategy, reshard):
    ranks(2, _beside, layer, strategy, reshard)
