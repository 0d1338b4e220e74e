"""Batch norm over data ranks: output, gradients and running buffers of one device with the whole batch."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.context import DENSE_DOMAIN
from shardwright.errors import ParallelError
from shardwright.grads import GradientSynchronizer, global_mean
from shardwright.parallel import (
    differing_buffers,
    parallelize,
    parallelize_batch_norm,
    parallelize_context,
    parallelize_fsdp,
    parallelize_replicate,
    parallelize_tensor,
)
from tests.parallel.table.worlds import context
from tests.tiers import one_in

KINDS = {
    "1d": lambda **kw: nn.BatchNorm1d(4, **kw),
    "2d": lambda **kw: nn.BatchNorm2d(4, **kw),
    "3d": lambda **kw: nn.BatchNorm3d(4, **kw),
}
SHAPES = {"1d": (4,), "2d": (4, 3, 2), "3d": (4, 2, 3, 2)}
OPTIONS = {
    "plain": {},
    "average": {"momentum": None},
    "no affine": {"affine": False},
    "no buffers": {"track_running_stats": False},
}
PARTS = {"even": (3, 3), "uneven": (1, 5), "empty": (0, 6)}


class Net(nn.Module):
    """Two norms around a linear map of channels, so that gradients go through statistics."""

    def __init__(self, kind, **options):
        super().__init__()
        self.first, self.second = KINDS[kind](**options), KINDS[kind](**options)
        self.map = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x).movedim(1, -1)
        return self.second(self.map(x).movedim(-1, 1).contiguous())


def _made(kind, options):
    torch.manual_seed(0)
    net = Net(kind, **options)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) / 3)
    return net.double()  # the gradient of a bias before a norm is 0: in single precision only noise


def _rows(kind, step):
    x = torch.randn(6, *SHAPES[kind], generator=torch.Generator().manual_seed(step))
    return x.double() * 2 + 1


def _train(kind, options, parts, verb, planted=False):
    at = context(data_parallel_shard=2)
    mesh = at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    one, net = _made(kind, options), _made(kind, options)
    names = [(name, type(m)) for name, m in net.named_modules()]
    if not planted:
        parallelize_batch_norm(net, mesh)
    assert names == [(name, type(m)) for name, m in net.named_modules()]
    verb(net, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3) for m in (one, net)]
    weight = torch.arange(4.0).reshape(1, 4, *([1] * (len(SHAPES[kind]) - 1)))
    for step in range(3):
        x = _rows(kind, step)
        ((one(x) * weight) ** 3).sum().div(x.numel()).backward()
        part = x.split(parts)[at.rank]
        loss = ((net(part) * weight) ** 3).sum()
        global_mean(loss, part.numel(), mesh).backward()
        GradientSynchronizer(net).synchronize()
        for name, p in net.named_parameters():
            torch.testing.assert_close(
                p.grad.full_tensor(), one.get_parameter(name).grad, rtol=1e-8, atol=1e-8
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, buffer in net.named_buffers():
        torch.testing.assert_close(buffer, one.get_buffer(name), rtol=1e-10, atol=1e-10)
    one.eval(), net.eval()
    x = _rows(kind, 9)
    if options.get("track_running_stats", True):
        torch.testing.assert_close(net(x), one(x), rtol=1e-9, atol=1e-9)
    return {name: buffer.tolist() for name, buffer in net.named_buffers()}


_MADE = [("1d", "plain"), ("2d", "average"), ("3d", "no affine"), ("2d", "no buffers")]
_VERBS = (parallelize_replicate, parallelize_fsdp)
_CASES = [(*made, verb, parts) for made, verb, parts in itertools.product(_MADE, _VERBS, PARTS)]


@pytest.mark.parametrize(("kind", "option", "verb", "parts"), one_in(2, _CASES))
def test_three_steps_are_those_of_one_device(ranks, kind, option, verb, parts):
    first, second = ranks(2, _train, kind, OPTIONS[option], PARTS[parts], verb)
    assert first == second  # bit for bit


def test_statistics_of_each_rank_alone_are_seen(ranks):
    with pytest.raises(Exception, match="not close"):
        ranks(2, _train, "1d", {}, (3, 3), parallelize_replicate, True)


def _beside_others(options):
    """Channels that tensor parallelism cuts, or positions that context parallelism does, of a rank's rows."""
    at = context(data_parallel_shard=2, tensor_parallel=2)
    dp, other = at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"], at.mesh_for(DENSE_DOMAIN)["tp"]
    one, by_words, cut = (_made("1d", options) for _ in range(3))
    parallelize_tensor(by_words, other, {"map": "colwise"})
    parallelize_context(cut, other, cut={"x": 2}, output="whole")
    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    ((one(x) * torch.arange(5.0)) ** 3).sum().backward()
    for net, inside in ((by_words, sw.spmd(other)), (cut, nullcontext())):
        parallelize_batch_norm(net, dp)
        parallelize_replicate(net, dp)
        with inside:
            ((net(x.split((1, 5))[dp.get_local_rank()]) * torch.arange(5.0)) ** 3).sum().backward()
        for name, p in net.named_parameters():
            torch.testing.assert_close(
                p.grad.full_tensor(), one.get_parameter(name).grad, rtol=1e-8, atol=1e-8
            )
        for name, buffer in net.named_buffers():
            whole = buffer.full_tensor() if isinstance(buffer, sw.DTensor) else buffer
            torch.testing.assert_close(whole, one.get_buffer(name), rtol=1e-10, atol=1e-10)
    with pytest.raises(ParallelError, match="a DTensor of several of them"):
        by_words.first(sw.distribute_tensor(x, dp, [sw.Shard(0)]))


@pytest.mark.parametrize("option", ["plain", "no affine"])
def test_what_other_axes_cut_of_a_ranks_rows_is_the_whole_batch_too(ranks, option):
    ranks(4, _beside_others, OPTIONS[option])


def _refusals():
    at = context(data_parallel_shard=2)
    mesh = at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"]

    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return x

    found = []
    done = parallelize_batch_norm(nn.BatchNorm1d(2), mesh)
    for module in (
        nn.Linear(2, 2),
        done,
        Own(2),
        nn.LazyBatchNorm1d(),
        nn.Sequential(nn.BatchNorm1d(2), Own(2)),
    ):
        before = [dict(vars(m)) for m in module.modules()]
        with pytest.raises(ParallelError) as caught:
            parallelize_batch_norm(module, mesh)
        assert before == [dict(vars(m)) for m in module.modules()]
        found.append(str(caught.value))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        done(torch.ones(1 if at.rank else 0, 2))
    with pytest.raises(ValueError, match="expected 2 or 3 dims"):
        done(torch.ones(2, 3))
    twin = copy.deepcopy(done)
    assert twin.forward.__self__ is twin
    torch.testing.assert_close(twin(torch.ones(2, 2)), torch.zeros(2, 2))
    return found


def test_what_is_no_batch_norm_of_torch_is_refused_and_left_as_it_was(ranks):
    words = ("no batch norm", "apply it once", "forward of its own", "LazyBatchNorm1d", "forward of its own")
    for found in ranks(2, _refusals):
        assert all(word in text for word, text in zip(words, found, strict=True))


def _named():
    at = context(data_parallel_shard=2)
    mesh = at.mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.0))
    before = differing_buffers(net, mesh)
    net(torch.randn(4, 3, generator=torch.Generator().manual_seed(at.rank)))
    with pytest.raises(ParallelError, match=r"have other buffers: 0\.running_mean, 0\.running_var"):
        parallelize(net, at, "fsdp", report=None)
    return before, differing_buffers(net, mesh)


def test_buffers_that_differ_between_ranks_are_named(ranks):
    assert ranks(2, _named) == [((), ("0.running_mean", "0.running_var"))] * 2


def _by_table():
    at = context(data_parallel_shard=2)
    net = parallelize(_made("2d", {}), at, {"": ["batch_norm", "fsdp"]}, report=None)
    one, x = _made("2d", {}), _rows("2d", 0)
    torch.testing.assert_close(net(x.split((1, 5))[at.rank]), one(x).split((1, 5))[at.rank])


def test_a_row_of_the_table_does_it(ranks):
    ranks(2, _by_table)
