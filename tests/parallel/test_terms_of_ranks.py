"""A rank's own term beside a parameter that nobody has gathered: refused, but where it is only added."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing import rank_mesh


class Weighed(nn.Module):
    """A model with weights of its losses, which a training loop reads."""

    def __init__(self):
        super().__init__()
        self.inner, self.log_weight = nn.Linear(4, 4), nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x):
        return self.inner(x).square().sum()


def _made(mesh, place):
    torch.manual_seed(0)
    model, rows = Weighed(), torch.randn(mesh.size(), 3, 4)
    one = copy.deepcopy(model)
    place(model, mesh)
    return model, one, rows, rows[mesh.get_local_rank()]


def _replicated_beside_cut(model, mesh):
    cut = sw.distribute_tensor(model.log_weight.detach(), mesh, {mesh.mesh_dim_names[0]: sw.Shard(0)})
    model.log_weight = nn.Parameter(cut)
    parallelize_replicate(model.inner, mesh)


def _same_gradients(model, one):
    GradientSynchronizer(model.parameters()).synchronize()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), one.get_parameter(name).grad, msg=name)


PLACES = [parallelize_fsdp, _replicated_beside_cut]


def _weighs(place):
    mesh = rank_mesh((2,), ("data",))
    model, _, _, mine = _made(mesh, place)
    term = model(mine)
    for weigh in WEIGH:
        with pytest.raises(RuleError, match=r"own term(.|\n)*global_mean"):
            weigh(term, model.log_weight)


WEIGH = [
    lambda term, weight: term * weight[1].exp(),
    lambda term, weight: weight[1].exp() * term,
    lambda term, weight: term / weight[0],
    lambda term, weight: torch.addcmul(weight[0], weight[1], term),
    lambda term, weight: term.maximum(weight[0]),
]


@pytest.mark.parametrize("place", PLACES)
def test_it_is_refused(ranks, place):
    ranks(2, _weighs, place)


def _mean(place):
    mesh = rank_mesh((2,), ("data",))
    model, one, rows, mine = _made(mesh, place)
    (global_mean(model(mine), 1, mesh) * model.log_weight[1].exp()).backward()
    (sum(map(one, rows)) / len(rows) * one.log_weight[1].exp()).backward()
    _same_gradients(model, one)


@pytest.mark.parametrize("place", PLACES)
def test_its_mean_over_the_ranks_is_right(ranks, place):
    ranks(2, _mean, place)


def _summed(place):
    mesh = rank_mesh((2,), ("data",))
    model, _, _, mine = _made(mesh, place)
    term = all_reduce(model(mine), "sum", mesh.get_group())
    return (term * model.log_weight[1].exp()).full_tensor().item()


@pytest.mark.parametrize("place", PLACES)
def test_a_sum_by_torch_is_taken(ranks, place):
    first, second = ranks(2, _summed, place)
    assert first == second


def _added(place):
    mesh = rank_mesh((2,), ("data",))
    model, one, rows, mine = _made(mesh, place)
    (model(mine) + model.log_weight[1].exp()).backward()
    (sum(map(one, rows)) + one.log_weight[1].exp()).backward()
    _same_gradients(model, one)


@pytest.mark.parametrize("place", PLACES)
def test_it_may_be_added(ranks, place):
    ranks(2, _added, place)


def _of_other_axes():
    mesh = rank_mesh((2, 2), ("data", "tensor"))
    model, _, _, mine = _made(mesh["data"], parallelize_fsdp)
    weight = nn.Parameter(sw.distribute_tensor(torch.ones(3), mesh["tensor"], {"tensor": sw.Shard(0)}))
    term = model(mine)
    (term * weight[1]).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), torch.tensor([0.0, 1.0, 0.0]) * term.detach())


def test_a_parameter_of_other_axes_may_be_weighed(ranks):
    """Its ranks have the same rows, and the same term."""
    ranks(4, _of_other_axes)
