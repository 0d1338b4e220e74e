"""Layers that share their experts: spread once, and computed with by each."""

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer
from shardwright.moe import MoELayer
from shardwright.parallel import parallelize_expert_parallel
from shardwright.testing import rank_mesh

DIM = 6


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(MoELayer(DIM, 8, 4, 2), nn.Tanh(), MoELayer(DIM, 8, 4, 2))


def _tie(model, what):
    first, second = model[0], model[2]
    if what == "experts":
        second.experts = first.experts
    elif what == "router and experts":
        second.experts, second.router = first.experts, first.router
    else:
        for name in ("gate", "up", "down"):
            getattr(second.experts, name).weight = getattr(first.experts, name).weight


def _trains(what):
    model = _layers().double()
    _tie(model, what)
    alone = copy.deepcopy(model)
    mesh = rank_mesh((2,), ("ep",))
    parallelize_expert_parallel(model, mesh, "ep")
    assert model[0].experts.gate.weight is model[2].experts.gate.weight
    tokens = torch.randn(7, DIM, generator=torch.Generator().manual_seed(1)).double()
    alone(tokens).square().sum().backward()
    model(tokens.split((3, 4))[mesh.get_local_rank()]).square().sum().backward()
    GradientSynchronizer(model).synchronize()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize("what", ["experts", "router and experts", "weights"])
def test_tied_experts_have_the_gradients_of_one_device(ranks, what):
    ranks(2, _trains, what)


def _is_refused_in_the_second():
    model, mesh = _layers(), rank_mesh((2,), ("ep",))
    sw.distribute_module(model[2].experts, mesh, {"gate.weight": {"ep": sw.Shard(1)}})
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ParallelError, match="cut already"):
        parallelize_expert_parallel(model, mesh, "ep")
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model[0].communicator is None


def test_experts_that_cannot_be_spread_leave_the_layers_before_as_they_were(ranks):
    ranks(2, _is_refused_in_the_second)
