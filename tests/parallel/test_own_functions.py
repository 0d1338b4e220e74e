"""Functions of `torch.autograd.Function` that take parameters which compute as local tensors."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import RuleError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.parallel import parallelize_replicate, parallelize_tensor
from shardwright.testing import rank_mesh


class Linear(torch.autograd.Function):
    """The function of torch's tutorial."""

    @staticmethod
    def forward(ctx, x, weight, bias, scale):
        ctx.save_for_backward(x, weight, bias, scale)
        return (x @ weight.T + bias) * scale

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, scale = ctx.saved_tensors
        inner = grad * scale
        return inner @ weight, inner.T @ x, inner.sum(0), (grad * (x @ weight.T + bias)).sum()


class Model(nn.Module):
    """One layer, used by the function, and by torch's own where `order` says."""

    def __init__(self, order):
        super().__init__()
        self.layer, self.scale, self.order = nn.Linear(4, 4), nn.Parameter(torch.tensor(1.5)), order

    def forward(self, x):
        if self.order == "after":
            x = (self.layer(x) * self.scale).tanh()
        x = Linear.apply(x, self.layer.weight, self.layer.bias, self.scale)
        return (self.layer(x.tanh()) * self.scale) if self.order == "before" else x


def _placed(model, tensor):
    if not tensor:
        mesh = rank_mesh((2,), ("data",))
        return parallelize_replicate(model, mesh), mesh, nullcontext
    mesh = rank_mesh((2, 2), ("data", "tp"))
    cut = {"layer.weight": {"tp": sw.Shard(0)}, "layer.bias": {"tp": sw.Shard(0)}}
    parallelize_tensor(model, mesh["tp"], cut)
    return parallelize_replicate(model, mesh["data"]), mesh, lambda: sw.spmd(mesh["tp"])


def _gradients(order, tensor, how) -> None:
    torch.manual_seed(0)
    model, rows = Model(order), torch.randn(5, 4)
    one = copy.deepcopy(model)
    model, mesh, inside = _placed(model, tensor)
    mine, synchronizer = rows.tensor_split(2)[mesh.get_local_rank("data")], GradientSynchronizer(model)

    def backward():
        with inside():
            model(mine).square().sum().backward()

    one(rows).square().sum().backward()
    one(rows).square().sum().backward()
    backward()
    if how == "overlapped":
        with synchronizer.overlapped():
            backward()
    else:
        backward()
    if how == "synchronized":
        synchronizer.synchronize()
    norm = (
        clip_grad_norm_(model, 1.0) if how != "torch" else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    )
    norm = norm.full_tensor() if isinstance(norm, sw.DTensor) else norm
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 1.0))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), one.get_parameter(name).grad, msg=name)
    for each in (model, one):
        torch.optim.SGD(each.parameters(), 0.1, momentum=0.9).step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), one.get_parameter(name), msg=name)


@pytest.mark.parametrize("how", ["synchronized", "overlapped", "clipped", "torch"])
@pytest.mark.parametrize("order", ["alone", "after", "before"])
def test_a_function_of_the_user_gives_terms(ranks, order, how):
    """What autograd gets from it is this rank's term, alone and in a sum with other gradients."""
    ranks(2, _gradients, order, False, how)


@pytest.mark.parametrize("order", ["alone", "after", "before"])
def test_a_function_of_the_user_gives_terms_on_the_axes_that_are_left(ranks, order):
    """Tensor parallelism beside it: the term lives on the axis of tensor parallelism alone."""
    ranks(4, _gradients, order, True, "synchronized")


def _summed_already() -> None:
    torch.manual_seed(0)
    model, *_ = _placed(Model("alone"), tensor=False)
    model(torch.randn(3, 4)).sum().backward()
    GradientSynchronizer(model).synchronize()
    with pytest.raises(RuleError, match="summed over the ranks already"):
        model(torch.randn(3, 4)).sum().backward()


def test_a_term_is_not_added_to_a_sum(ranks):
    """It would be a reduction inside of the backward, which a rank without rows never joins."""
    ranks(2, _summed_already)


def _transformed(name) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 3), torch.randn(5, 4)
    model = parallelize_replicate(copy.deepcopy(plain), rank_mesh((2,), ("data",)))
    transform = getattr(torch.func, name)

    def of(module, given):
        # one parameter is transformed, the other is not
        held = {**dict(module.named_parameters()), **given}
        return torch.func.functional_call(module, held, (x,)).square().sum()

    wanted = transform(lambda w: of(plain, {"weight": w}))(plain.weight)
    with pytest.raises(RuleError, match=r"torch.func.*\n.*to_local"):
        transform(lambda w: of(model, {"weight": w}))(model.weight)
    local = {key: p.to_local() for key, p in model.named_parameters()}
    got = transform(lambda w: of(model, {**local, "weight": w}))(local["weight"])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_transforms_of_parameters_that_compute_locally_are_refused_by_name(ranks, name):
    ranks(2, _transformed, name)
