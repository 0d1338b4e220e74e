"""A residual model to be cut over tp and placed on data axes, and the gradients that one device gives it."""

import copy

import torch
from torch import nn

import shardwright as sw
from shardwright.grads import GradientSynchronizer

WIDTH, OUT = 8, 5
PLAN = {"*.up.weight": {"tp": sw.Shard(0)}, "*.down.weight": {"tp": sw.Shard(1)}}


class Residual(nn.Module):
    """x + down(up(norm(x))), and a weight that the block reads twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Two blocks, one of them used twice, a frozen weight, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUT, bias=False)

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.norm(x * self.gain))


def residual():
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return Model()


def rows(counts):
    """The rows of all members, and each member's."""
    x = torch.randn(sum(counts), 3, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, x.split(counts)


def one_device(model, x):
    """Name -> gradient of the sum of squares over everybody's rows."""
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def check(model, wanted, scale=1.0):
    """Each gradient is one device's, in its parameter's layout."""
    for name, p in model.named_parameters():
        if wanted[name] is None:
            assert p.grad is None, name
            continue
        assert p.grad._spec.layout.placements == p._spec.layout.placements, (name, p.grad.placements)
        assert p.grad._spec.layout.order == p._spec.layout.order, name
        limit = 1e-5 * wanted[name].abs().max().item() * scale
        torch.testing.assert_close(
            p.grad.full_tensor(), wanted[name] * scale, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


def run(model, backward, wanted, passes=1, static=False):
    """Backward, sum, check; again after both ways of zeroing."""
    synchronizer = GradientSynchronizer(model, static=static)
    for set_to_none in (True, False, True):
        for _ in range(passes):
            backward()
        synchronizer.synchronize()
        check(model, wanted, passes)
        model.zero_grad(set_to_none=set_to_none)
