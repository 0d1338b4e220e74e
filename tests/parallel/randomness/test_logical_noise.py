"""Noise of the rows of a batch under logical dropout: that of the whole batch, whoever holds which rows."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.grads import GradientSynchronizer
from shardwright.parallel import parallelize
from tests.parallel.table.worlds import context

from .philox_in_numpy import words

ROWS, WIDTH = 5, 3


class _DropPath(nn.Module):
    """Paths that are dropped for some rows, noise of each row, and numbers that all rows share."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        kept = (0.5 + torch.rand((x.shape[0], 1))).floor()
        noise = torch.empty_like(x).normal_() + torch.bernoulli(torch.full_like(x, 0.5))
        self.of_rows = torch.cat([kept, noise, torch.randint(9, (x.shape[0], 2))], 1)
        self.shared = torch.cat([torch.rand((7,)), torch.rand(())[None]])
        return self.w(x) * kept + noise * self.shared[0]


class _Model(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.reentrant = _DropPath(), _DropPath(), reentrant

    def forward(self, x):
        x = self.first(x)
        return (
            self.second(x)
            if self.reentrant is None
            else checkpoint(self.second, x, use_reentrant=self.reentrant)
        )


def _drawn(parts, reentrant):
    at = context(data_parallel_shard=2)
    at.seed(0, dropout="logical")
    model = parallelize(_Model(reentrant), at, {"": "fsdp"}, report=None)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x.split(parts)[at.rank]).square().sum().backward()
    GradientSynchronizer(model).synchronize()
    seen = {n: (m.of_rows.detach(), m.shared) for n, m in (("first", model.first), ("second", model.second))}
    return seen, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def _one_device(seen):
    """Gradients of plain torch with the noise that the ranks have drawn."""
    model = _Model(None)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    for name, module in (("first", model.first), ("second", model.second)):
        kept, noise = seen[name][0][:, :1], seen[name][0][:, 1 : 1 + WIDTH]
        x = module.w(x) * kept + noise * seen[name][1][0]
    x.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_noise_is_that_of_the_whole_batch_and_of_its_backward(ranks, reentrant):
    all_seen = []
    for parts in ((2, 3), (1, 4)):
        (one, gradients), (other, _) = ranks(2, _drawn, parts, reentrant)
        seen = {name: (torch.cat([one[name][0], other[name][0]]), one[name][1]) for name in one}
        for name in one:
            assert torch.equal(one[name][1], other[name][1])
        all_seen.append(seen)
        for name, wanted in _one_device(seen).items():
            torch.testing.assert_close(gradients[name], wanted, rtol=1e-4, atol=1e-5)
    for name in ("first", "second"):
        assert torch.equal(all_seen[0][name][0], all_seen[1][name][0])
        assert len(all_seen[0][name][0].unique(dim=0)) == ROWS  # no two rows alike


class _Rand(nn.Module):
    def forward(self, x):
        return torch.rand((x.shape[0], 2))


def _uniform():
    at = context(data_parallel_shard=2)
    at.seed(0, dropout="logical")
    model = parallelize(nn.Sequential(nn.Linear(2, 2), _Rand()), at, {"": "fsdp"}, report=None)
    before = torch.get_rng_state()
    found = model(torch.zeros((1, 3)[at.rank], 2))
    torch.set_rng_state(before)
    return found, int(torch.empty((), dtype=torch.int64).random_())


def test_uniform_numbers_are_those_of_the_generator(ranks):
    (one, key), (other, _) = ranks(2, _uniform)
    wanted = (words(8, key) >> np.uint64(8)).astype(np.float32) * np.float32(2**-24)
    assert torch.equal(torch.cat([one, other]), torch.from_numpy(wanted.reshape(4, 2)))


def _leaky(tp, inplace):
    """Slopes of a model that gives -1 everywhere, and the gradient of its bias."""
    at = context(data_parallel_shard=2, tensor_parallel=tp)
    at.seed(0, dropout="logical")
    linear = nn.Linear(2, 2)
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.fill_(-1.0)
    table = {"": "fsdp"} | ({"0": "colwise"} if tp > 1 else {})
    model = parallelize(nn.Sequential(linear, nn.RReLU(0.0, 1.0, inplace)), at, table, report=None)
    dp = at.mesh_for("batch")["dp"].get_local_rank()
    before = torch.get_rng_state()
    with sw.spmd(at.mesh_for("regular")["tp"]) if tp > 1 else nullcontext():
        slopes = -model(torch.zeros(((1, 3)[dp], 2)))
        (-slopes).sum().backward()
    GradientSynchronizer(model).synchronize()
    torch.set_rng_state(before)
    key = int(torch.empty((), dtype=torch.int64).random_())
    slopes = slopes.full_tensor() if tp > 1 else slopes
    return dp, slopes.detach(), linear.bias.grad.full_tensor(), key


@pytest.mark.parametrize(("tp", "inplace"), [(1, False), (1, True), (2, False)])
def test_random_slopes_are_those_of_the_rows(ranks, tp, inplace):
    found = ranks(2 * tp, _leaky, tp, inplace)
    (_, one, gradient, key), (_, other, _, _) = (next(r for r in found if r[0] == dp) for dp in (0, 1))
    wanted = torch.from_numpy((words(8, key) >> np.uint64(8)).astype(np.float32) * np.float32(2**-24))
    assert torch.equal(torch.cat([one, other]), wanted.reshape(4, 2))
    torch.testing.assert_close(gradient, wanted.reshape(4, 2).sum(0))
