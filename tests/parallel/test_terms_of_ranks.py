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


def _weighed_after(place):
    mesh = rank_mesh((2,), ("data",))
    model, _, _, mine = _made(mesh, place)
    for weigh in WEIGH_AFTER:
        total = model(mine) + _penalty_of(model)
        with pytest.raises(RuleError, match=r"own term(.|\n)*global_mean"):
            weigh(total, model.log_weight)
    both = torch.stack([model(mine), _penalty_of(model)])
    for weigh in WEIGH_PAIRS:
        with pytest.raises(RuleError, match=r"own term(.|\n)*global_mean"):
            weigh(both, model.log_weight)


def _penalty_of(model):
    """A term of a parameter alone, which counts once."""
    return model.log_weight.square().sum()


WEIGH_AFTER = [
    lambda total, weight: total * weight[1].exp(),
    lambda total, weight: weight[1] / (2 * total),
    lambda total, weight: (total / 3 + weight[0]) * weight[1],
    lambda total, _: total.exp(),
    lambda total, _: total * total,
    lambda total, _: (-total).relu(),
    lambda total, weight: nn.functional.mse_loss(total, weight[0]),
    lambda total, weight: torch.addcmul(weight[0], total, weight[1]),
    lambda total, weight: total.mul_(weight[1]),
    lambda total, weight: total.redistribute(placements=[sw.Replicate()]) * weight[1],
    lambda total, weight: total.full_tensor() * weight[1],
]
WEIGH_PAIRS = [
    lambda both, weight: (both * weight[:2].exp()).sum(),
    lambda both, weight: torch.dot(both, weight[:2]),
    lambda both, _: both.logsumexp(0),
    lambda both, _: both.norm(),
]


@pytest.mark.parametrize("place", PLACES)
def test_what_it_was_added_to_is_refused(ranks, place):
    """The gradient of what weighs it was another one on each rank, in silence."""
    ranks(2, _weighed_after, place)


def _only_added(place):
    mesh = rank_mesh((2,), ("data",))
    for total in ADDED:
        model, one, rows, mine = _made(mesh, place)
        total(model(mine), model.log_weight).backward()
        total(sum(map(one, rows)), one.log_weight).backward()
        _same_gradients(model, one)


ADDED = [
    lambda term, weight: (term + weight.square().sum()) * 0.5,
    lambda term, weight: (weight.square().sum() - term) / torch.tensor(3.0) * -1,
    lambda term, weight: (term + weight.square().sum()).to(torch.float64).mean().clone().view(1).squeeze(),
    lambda term, weight: torch.stack([term, weight.square().sum(), weight[1].exp() * weight[0]]).sum(),
    lambda term, weight: (term + weight[0].square()) + weight[1] * weight[2],
    lambda term, weight: torch.lerp(term + weight[0].square(), weight.square().sum(), 0.25),
]


@pytest.mark.parametrize("place", PLACES)
def test_what_it_was_added_to_may_be_added_and_scaled(ranks, place):
    ranks(2, _only_added, place)


def _mean_and_more(place):
    """A mean over the ranks is the same on all of them, also in a sum; a detached sum is a number."""
    mesh = rank_mesh((2,), ("data",))
    model, one, rows, mine = _made(mesh, place)
    total = global_mean(model(mine), 1, mesh) + _penalty_of(model)
    assert total.item() == pytest.approx(total.detach().full_tensor().item())
    (total * model.log_weight[1].exp()).backward()
    ((sum(map(one, rows)) / len(rows) + _penalty_of(one)) * one.log_weight[1].exp()).backward()
    _same_gradients(model, one)


@pytest.mark.parametrize("place", PLACES)
def test_a_sum_with_its_mean_may_be_weighed(ranks, place):
    ranks(2, _mean_and_more, place)


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
