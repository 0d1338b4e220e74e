"""Equal placements that are applied in another order hold other elements: nothing takes one for the other."""

import contextlib

import pytest
import torch

import shardwright as sw
from shardwright.errors import LayoutError
from shardwright.grads import GradientSynchronizer, clip_grad_norm_
from shardwright.testing.meshes import rank_mesh

S, P, R = sw.Shard(0), sw.Partial("sum"), sw.Replicate()
ORDER, TURNED = ("a", "b", "c"), ("b", "a", "c")
X, Y = torch.arange(4.0), 10 * torch.arange(4.0)


def _place(x, last=R, order=ORDER):
    mesh = rank_mesh((2, 2, 1), ORDER)
    return sw.distribute_tensor(x.clone(), mesh, [S, S, last], order=order, src_data_rank=None)


CALLS = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.clone().add_(y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "foreach": lambda x, y: torch._foreach_mul([x, x], [y, y])[1],
}


def _calls():
    """The first time, and known; also where the other is pending, and finished once for all readers."""
    for name, call in CALLS.items():
        for last in (R, P):
            for block in (contextlib.nullcontext, lambda: sw.spmd(rank_mesh((2, 2, 1), ORDER))):
                for turn in range(3):
                    with block():
                        found = call(_place(X, order=TURNED), _place(Y, last))
                    torch.testing.assert_close(found.full_tensor(), call(X, Y), msg=f"{name} {last} {turn}")


def test_operands_of_one_call(ranks):
    ranks(4, _calls)


def _gradients():
    gradient = torch.tensor([0.1, 0.5, -0.3, 0.2])
    for finish in (
        lambda m: clip_grad_norm_(m.parameters(), 100.0),
        lambda m: GradientSynchronizer(m).synchronize(),
    ):
        for last in (R, P):
            module = torch.nn.Module()
            module.w = torch.nn.Parameter(_place(X, order=TURNED))
            module.w.grad = _place(gradient, last)
            finish(module)
            torch.testing.assert_close(module.w.grad.full_tensor(), gradient)


def test_gradients_of_parameters(ranks):
    ranks(4, _gradients)


def _steps(name):
    plain = torch.nn.Parameter(X.clone())
    ours = torch.nn.Parameter(_place(X, order=TURNED))
    optimizers = [getattr(torch.optim, name)([p], lr=0.1) for p in (plain, ours)]
    for turn in range(3):
        plain.grad, ours.grad = Y + turn, _place(Y + turn, P if turn == 1 else R)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.full_tensor(), plain)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_steps_of_optimizers(ranks, name):
    ranks(4, _steps, name)


def _placed_already():
    x = _place(X, order=TURNED)
    assert sw.distribute_tensor(x, x.device_mesh, [S, S, R], order=TURNED) is x
    for order in (None, ORDER):
        with pytest.raises(LayoutError, match="already distributed as"):
            sw.distribute_tensor(x, x.device_mesh, [S, S, R], order=order)


def test_what_is_placed_already(ranks):
    ranks(4, _placed_already)
