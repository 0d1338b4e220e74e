"""A backward that is recorded for a second one, through units that have given their memory back by then."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing import rank_mesh


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8), nn.Tanh()))


def _penalty(model, x):
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def _refused():
    """The norm's second derivative had ended the process."""
    mesh, model, x = rank_mesh((2,), ("dp",)), _net(), torch.randn(4, 8).requires_grad_()
    parallelize_fsdp(model[1], mesh)
    parallelize_fsdp(model, mesh)
    with pytest.raises(ParallelError) as caught:
        _penalty(model, x)
    torch.manual_seed(1)
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    one = _net()
    (2 * one(x).square().sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), one.get_parameter(name).grad)
    return str(caught.value)


def test_a_penalty_is_refused_and_the_next_step_is_right(ranks):
    for said in ranks(2, _refused):
        assert "create_graph=True goes through Sequential, a sharded unit" in said
        assert "fix: parallelize_replicate for this module" in said


def _of_a_frozen_critic():
    torch.manual_seed(2)
    x = torch.randn(4, 8).requires_grad_()
    critic, one = parallelize_fsdp(_net().requires_grad_(False), rank_mesh((2,), ("dp",))), _net()
    critic.set_reshard_after_backward(False)
    _penalty(critic, x)
    found, x.grad = x.grad, None
    _penalty(one.requires_grad_(False), x)
    torch.testing.assert_close(found, x.grad)


def test_a_penalty_through_a_frozen_unit_that_keeps_its_parameters(ranks):
    ranks(2, _of_a_frozen_critic)


def _of_parameters(place, inside):
    """Data ranks share the parameters, and each has a loss of its own on the ranks of `tp`."""
    mesh, x = rank_mesh((2, 2), ("dp", "tp")), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model, one = _net(), _net()
    sw.distribute_module(model[0], mesh["tp"], {"weight": {"tp": sw.Shard(0)}, "bias": {"tp": sw.Shard(0)}})
    place(model, mesh["dp"])
    scale = 0.05 if place is parallelize_replicate else 0.1  # there each data rank has a penalty of its own
    with sw.spmd(mesh["tp"]):
        loss = model(x.chunk(2)[mesh.get_local_rank("dp")]).square().sum()
        if inside:
            loss = loss + scale * sum(p.square().sum() for p in model.parameters())
    if not inside:
        loss = loss + scale * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    (one(x).square().sum() + 0.1 * sum(p.square().sum() for p in one.parameters())).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), one.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("place", "inside"), [(parallelize_fsdp, True), (parallelize_fsdp, False), (parallelize_replicate, True)]
)
def test_a_penalty_on_parameters_beside_a_loss_of_tensor_ranks(ranks, place, inside):
    ranks(4, _of_parameters, place, inside)
