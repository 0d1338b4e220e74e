"""A backward that recomputes, or computes itself, sees distributed parameters as its forward did."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import parallelize_fsdp, parallelize_replicate
from shardwright.testing.meshes import rank_mesh

from .residual import PLAN, one_device, residual, rows


def _close(gradient, wanted):
    full = gradient.full_tensor() if isinstance(gradient, sw.DTensor) else gradient
    torch.testing.assert_close(full, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def _losses(out):
    """The loss as the program has it: a DTensor, or plain as behind a module that hands out local tensors."""
    yield "distributed", out.square().sum()
    yield "plain", out.redistribute([sw.Replicate()]).to_local().square().sum()


def _outside_of_the_block(kind, reentrant):
    mesh = rank_mesh((1, 2), ("dp", "tp"))
    model = residual()
    x, _ = rows((3,))
    whole = x.clone().requires_grad_()
    wanted = one_device(model, whole)
    sw.distribute_module(model, mesh["tp"], PLAN)
    parallelize_replicate(model, mesh["dp"])
    given = x.clone().requires_grad_()
    with sw.spmd(mesh["tp"]):
        loss = dict(_losses(checkpoint(model, given, use_reentrant=reentrant)))[kind]
    loss.backward()
    if not reentrant:
        assert type(given.grad) is torch.Tensor
    _close(given.grad, whole.grad)
    for name, p in model.named_parameters():
        if wanted[name] is not None:
            _close(p.grad, wanted[name])


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("kind", ["distributed", "plain"])
def test_a_backward_outside_of_the_block_recomputes_as_inside(ranks, kind, reentrant):
    ranks(2, _outside_of_the_block, kind, reentrant)


def _asked_for():
    mesh = rank_mesh((2,), ("dp",))
    model = residual()
    x, parts = rows((1, 2))
    wanted = one_device(model, x)
    parallelize_replicate(model, mesh)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = checkpoint(model, parts[mesh.get_local_rank()], use_reentrant=False).square().sum()
    for name, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True):
        _close(gradient, wanted[name])


def test_gradients_that_are_asked_for_are_recomputed(ranks):
    ranks(2, _asked_for)


class _Scaled(torch.autograd.Function):
    """Multiplies by a weight; its backward reads the weight itself, not what the forward saved of it."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x * layer.factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.layer.factor, None


class _Factor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.factor = nn.Parameter(torch.linspace(1, 2, 4), requires_grad=False)

    def forward(self, x):
        return _Scaled.apply(self.inner(x), self)


def _computes_in_its_backward():
    mesh = rank_mesh((1, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model = _Factor()
    one = copy.deepcopy(model)
    x = torch.randn(3, 4)
    one(x).square().sum().backward()
    sw.distribute_module(model, mesh["tp"], {"inner.weight": {"tp": sw.Shard(0)}})
    parallelize_replicate(model, mesh["dp"])
    with sw.spmd(mesh["tp"]):
        model(x).square().sum().backward()
    _close(model.inner.weight.grad, one.inner.weight.grad)


def test_a_users_own_backward_computes_with_the_parameter(ranks):
    ranks(2, _computes_in_its_backward)


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


def _ends_too_early(look):
    mesh = rank_mesh((2,), ("dp",))
    model = _Twice()
    parallelize_fsdp(model.block, mesh)
    parallelize_fsdp(model, mesh)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ParallelError, match=r"block\.weight.*gathered still by a sharded unit") as caught:
        look(model)
    assert "use_reentrant=False" in str(caught.value)


def _synchronize(model):
    GradientSynchronizer(model).synchronize()


def _clip(model):
    clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("look", [_synchronize, _clip])
def test_a_unit_whose_backward_ends_too_early_is_refused(ranks, look):
    """torch's own units are left gathered there, with gradients of the first call alone."""
    ranks(2, _ends_too_early, look)
