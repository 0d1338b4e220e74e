"""Gradients that torch makes of a shape alone lie as their operand does."""

import pytest
import torch

import shardwright as sw

from .cases import close, full, place

CALLS = {
    "sgn": lambda x, y: torch.sgn(x),
    "sgn_": lambda x, y: x.clone().sgn_(),
    "copysign": torch.copysign,
    "copysign_": lambda x, y: x.clone().copysign_(y),
    "no copies": lambda x, y: x.repeat(0, 1).sum() + x.sum(),
    "none at all": lambda x, y: x.tile(0, 1),
    "passed over": lambda x, y: torch.cat([x[0, :0], y[0]]),
    "nothing at all": lambda x, y: torch.hstack([x[0, :0], y[0, :0]]),
}


def _lie_as_the_operand():
    for name, call in CALLS.items():
        for cut in (sw.Shard(0), sw.Shard(1), sw.Ragged((1, 2), (0,)), sw.Replicate()):
            plain = [full(3, 4, seed=seed).requires_grad_() for seed in (0, 1)]
            ours = [place(x.detach(), (cut,), requires_grad=True) for x in plain]
            wanted, got = call(*plain), call(*ours)
            close(got.detach(), wanted.detach(), name)
            wanted.sum().backward()
            got.sum().backward()
            for x, w in zip(ours, plain, strict=True):
                assert (x.grad is None) == (w.grad is None), name
                if x.grad is not None:
                    assert isinstance(x.grad, sw.DTensor), (name, cut)
                    close(x.grad, w.grad, name)
                    x.grad.add_(x.detach())
                    close(x.grad, w.grad + w.detach(), name)


@pytest.mark.parametrize("world", [2])
def test_a_gradient_made_of_a_shape_lies_as_its_operand(ranks, world):
    ranks(world, _lie_as_the_operand)
