"""A backward that raised, and was caught, is forgotten by the next forward of sharded units."""

import copy

import pytest
import torch
from torch import nn

from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize_fsdp, parallelize_hsdp
from shardwright.testing import rank_mesh


class _Raising(torch.autograd.Function):
    raises = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if _Raising.raises:
            raise ValueError("by the program")
        return gradient


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.c(self.b(_Raising.apply(self.a(x).tanh())).tanh())


def _trained(apart, keep, shards):
    """Gradients of one device; the backward of the second step raises on all ranks, and is repeated."""
    sharded = shards < 2
    mesh = rank_mesh((2,), ("dp",)) if sharded else rank_mesh((2, 2), ("replicate", "shard"))
    torch.manual_seed(0)
    alone = _Net()
    model = copy.deepcopy(alone)
    for unit in [model.b, model] if apart else [model]:
        options = {"reshard_after_forward": False} if keep else {}
        if sharded:
            parallelize_fsdp(unit, mesh, **options)
        else:
            parallelize_hsdp(unit, mesh, shard_dim="shard", **options)
    world = mesh.size()
    synchronizer = GradientSynchronizer(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (alone, model)]
    for step in range(3):
        x = torch.randn(4 * world, 6, generator=torch.Generator().manual_seed(step))
        mine = x[torch.distributed.get_rank() :: world]
        if step == 1:
            _Raising.raises = True
            with pytest.raises(ValueError, match="by the program"):
                model(mine).square().sum().backward()
            _Raising.raises = False
            optimizers[1].zero_grad()
        for each, rows in ((alone, x), (model, mine)):
            each(rows).square().sum().backward()
        synchronizer.synchronize()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_training_goes_on_after_a_backward_that_raised(ranks, apart, keep):
    """torch queued no end of any later backward: each rank trained alone."""
    ranks(2, _trained, apart, keep, 1)


def test_so_it_does_under_hsdp(ranks):
    ranks(4, _trained, True, False, 2)
