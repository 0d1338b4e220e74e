"""`redistribute(..., async_op=True)`: posted before it returns, waited for by whoever looks first."""

import gc
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.comm import program
from shardwright.show import trace
from shardwright.testing.meshes import rank_mesh

R, S0, S1, P = sw.Replicate(), sw.Shard(0), sw.Shard(1), sw.Partial()
LAYOUTS = ([R, R], [S0, S1], [S1, S0], [P, S0], [R, P], [P, P], [sw.ZigZag(0), sw.Owner(1)], [S0, R])


def _numbers(*shape, seed=0):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).add(seed).remainder(7).view(shape)


def _place(x, mesh, placements, **kwargs):
    placed = sw.distribute_tensor(x, mesh).redistribute(mesh, placements).detach()
    return placed.requires_grad_(**kwargs) if kwargs else placed


def _as_if_waited_for(sizes):
    mesh = rank_mesh(sizes, ("a", "b"))
    x, weight = _numbers(12, 10), _numbers(12, 10, seed=3)
    for source, target in itertools.product(LAYOUTS, repeat=2):
        d = _place(x, mesh, source, requires_grad=True)
        later = d.redistribute(mesh, target, async_op=True)
        now = d.redistribute(mesh, target)
        assert sw.layout_of(later) == sw.layout_of(now)
        assert later.requires_grad
        assert torch.equal(later.to_local(), now.to_local()), (source, target)
        later = d.redistribute(mesh, target, async_op=True)
        (later * sw.distribute_tensor(weight, mesh)).sum().backward()
        assert torch.equal(d.grad.full_tensor(), weight), (source, target)


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_values_and_gradients_are_those_of_a_redistribution_that_waits(ranks, sizes):
    ranks(sizes[0] * sizes[1], _as_if_waited_for, sizes)


def _source_may_change():
    mesh = rank_mesh((4,), ("a",))
    x = _numbers(16, 8)
    for source, target in (([S0], [R]), ([S0], [S1]), ([P], [S0]), ([P], [R]), ([S1], [sw.Owner(0)])):
        d = _place(x, mesh, source)
        later = d.redistribute(mesh, target, async_op=True)
        d._local_tensor.fill_(-5)
        assert torch.equal(later.full_tensor(), x), (source, target)


def test_the_source_may_be_overwritten_before_anybody_waits(ranks):
    ranks(4, _source_may_change)


def _overlaps():
    """Rank 0 sends nothing before the others have their tensors: who waits for it waits for ever."""
    mesh = rank_mesh((4,), ("a",))
    store = dist.distributed_c10d._get_default_store()
    d = _place(_numbers(512, 256), mesh, [S0])
    p = _place(_numbers(512, 256), mesh, [P])
    for number, (x, target) in enumerate(((d, [R]), (d, [S1]), (p, [S0]), (p, [R]))):
        keys = [f"posted {number} by {rank}" for rank in range(4)]
        if dist.get_rank() == 0:
            store.wait(keys[1:], timedelta(seconds=60))
        with trace() as seen:
            later = x.redistribute(mesh, target, async_op=True)
        store.set(keys[dist.get_rank()], "")
        assert len(seen.collectives) == 1
        assert torch.equal(later.full_tensor(), x.full_tensor())


def test_it_returns_before_its_peers_have_sent_anything(ranks):
    ranks(4, _overlaps)


def _every_way():
    mesh = rank_mesh((4,), ("a",))
    x = _numbers(16, 8)
    d = _place(x, mesh, [S0])

    def later():
        return d.redistribute(mesh, [S1], async_op=True)

    full = sw.distribute_tensor(x, mesh, [S1])
    assert torch.equal((later() + 1).full_tensor(), x + 1)
    assert torch.equal((later() @ full.t()).full_tensor(), x @ x.t())
    assert torch.equal(later().clone().full_tensor(), x)
    assert torch.equal(later().view(4, 4, 8).full_tensor(), x.view(4, 4, 8))
    assert torch.equal(later().add_(1).full_tensor(), x + 1)
    assert torch.equal(torch._foreach_add([later()], 1.0)[0].full_tensor(), x + 1)
    assert torch.equal(later().detach().full_tensor(), x)
    twice = later().redistribute(mesh, [R], async_op=True)
    assert torch.equal(twice.redistribute(mesh, [S0]).full_tensor(), x)
    assert later().sum().item() == x.sum().item()
    assert "DTensor" in repr(later())
    assert torch.equal(torch.nn.Parameter(later()).full_tensor(), x)
    with torch.inference_mode():
        first = later()
    assert torch.equal(first.full_tensor(), x)
    second = later()
    with torch.inference_mode():
        assert torch.equal(second.full_tensor(), x)
    assert torch.equal((second * full.requires_grad_()).full_tensor(), x * x)
    compiled = torch.compile(lambda t: t * 2, backend="aot_eager")
    assert torch.equal(compiled(later()).full_tensor(), x * 2)


def test_every_way_to_the_local_tensor_waits(ranks):
    ranks(4, _every_way)


def _thrown_away():
    mesh = rank_mesh((4,), ("a",))
    x = _numbers(64, 32)
    d = _place(x, mesh, [S0])
    for _ in range(3):
        d.redistribute(mesh, [S1], async_op=True)
    gc.collect()
    several = [d.redistribute(mesh, target, async_op=True) for target in ([S1], [R], [S1])]
    for one in reversed(several):  # in another order than they were posted
        assert torch.equal(one.full_tensor(), x)
    assert x.nbytes < program.STRAIGHT_BYTES  # small ones travel as messages too


def test_results_may_be_dropped_and_looked_at_in_any_order(ranks):
    ranks(4, _thrown_away)
