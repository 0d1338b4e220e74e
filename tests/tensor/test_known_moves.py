"""Known redistributions: run again without a question, and everything that makes them unknown is seen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs

import shardwright as sw
from shardwright.comm.traced import in_groups
from shardwright.errors import LayoutError, PlacementError, PlanError
from shardwright.remember import forget
from shardwright.testing import rank_mesh

SIZES = (8, 6)
KNOWN_AFTER = 3


def _whole(dtype=torch.float32):
    return torch.arange(48.0).view(SIZES).to(dtype)


def _cut(mesh, dim=0, **kwargs):
    return sw.distribute_tensor(_whole(**kwargs), mesh, [sw.Shard(dim)] * mesh.ndim, src_data_rank=None)


def _known(move):
    for _ in range(KNOWN_AFTER):
        move()


def _another_network():
    """Cut by both axes: what goes in one round or by levels is planned for the network."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    x = sw.distribute_tensor(_whole(), mesh, [sw.Shard(0), sw.Shard(0)], src_data_rank=None)
    to = [sw.Replicate(), sw.Replicate()]
    _known(lambda: x.redistribute(mesh, to))
    try:
        sw.use_network(sw.Network(slow_axes=("dp",)))
        plan = sw.plan_redistribution(sw.layout_of(x), sw.layout_of(x).with_placements(to))
        with sw.trace() as record:
            assert torch.equal(x.redistribute(mesh, to).to_local(), _whole())
        return len(record.collectives), plan.rounds
    finally:
        sw.use_network(sw.Network())


def test_a_known_move_is_planned_anew_for_another_network(ranks):
    assert ranks(4, _another_network) == [(2, 2)] * 4


def _forms():
    """Every way to write a target means the same, first and known, and does not disturb the others."""
    mesh = rank_mesh((2,), ("tp",))
    x = _cut(mesh)
    for _ in range(KNOWN_AFTER):
        for to in ([sw.Shard(1)], (sw.Shard(-1),), [theirs.Shard(1)], {"tp": sw.Shard(1)}):
            for given in (
                ((to,), (mesh, to), (None, to)) if isinstance(to, dict) else ((mesh, to), (None, to))
            ):
                moved = x.redistribute(*given)
                assert moved.placements == (sw.Shard(1),)
                assert torch.equal(moved.to_local(), _whole().chunk(2, 1)[dist.get_rank()])
        striped = x.redistribute({"tp": sw.Interleaved(1, 3)})
        assert striped.placements == (sw.Interleaved(1, 3),)
        strided = theirs.placement_types._StridedShard(1, split_factor=3)
        assert x.redistribute(mesh, [strided]).placements == (sw.Interleaved(1, 3),)
        same = x.redistribute(mesh, [sw.Shard(0)])
        assert same is not x
        assert same.to_local().data_ptr() == x.to_local().data_ptr()
        with pytest.raises(LayoutError, match="2 placements"):
            x.redistribute(mesh, [sw.Shard(1), sw.Shard(1)])
        with pytest.raises(LayoutError, match="no axis"):
            x.redistribute({"dp": sw.Shard(1)})


def test_every_form_of_a_target_is_known_as_what_it_means(ranks):
    ranks(2, _forms)


class Unhashable(sw.Shard):
    """A cut whose class forgot to be hashable."""

    __hash__ = None


def _unhashable():
    mesh = rank_mesh((2,), ("tp",))
    for _ in range(KNOWN_AFTER):
        with pytest.raises(PlacementError, match="cannot be hashed"):
            _cut(mesh).redistribute(mesh, [Unhashable(1)])


def test_a_placement_that_cannot_be_hashed_is_named(ranks):
    ranks(2, _unhashable)


def _gradients():
    """The gradient of a known move comes from the layout that it has this time."""
    mesh = rank_mesh((2,), ("tp",))
    weight = torch.arange(48.0).view(SIZES) + 1
    for _ in range(KNOWN_AFTER):
        for of_weight in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
            x = _cut(mesh).requires_grad_()
            w = sw.distribute_tensor(weight, mesh, [of_weight])
            (x.redistribute(mesh, [sw.Replicate()]) * w).sum().backward()
            assert x.grad.placements == (sw.Shard(0),)
            assert torch.equal(x.grad.full_tensor(), weight)
        for of_weight, of_grad in ((sw.Shard(1), sw.Partial()), (sw.Replicate(), sw.Replicate())):
            x = sw.distribute_tensor(_whole(), mesh, [sw.Replicate()]).requires_grad_()
            w = sw.distribute_tensor(weight.t(), mesh, [of_weight])
            (x.redistribute(mesh, [sw.Shard(0)]) @ w).sum().backward()
            assert x.grad.placements == (of_grad,)  # what is whole takes terms as they come
            assert torch.equal(x.grad.full_tensor(), weight.sum(0).expand(SIZES))
        x = _cut(mesh).requires_grad_()
        y = x.redistribute(mesh, [sw.Shard(1)])
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.allclose(second.full_tensor(), 6 * _whole())


def test_the_gradient_of_a_known_move_follows_what_came(ranks):
    ranks(2, _gradients)


def _flags_and_copies():
    """What a local tensor says of itself (conjugated, a view of what was written) is no part of a spec."""
    mesh = rank_mesh((2,), ("tp",))
    x = _cut(mesh, dtype=torch.complex64) * (1 + 2j)
    whole = _whole(torch.complex64) * (1 + 2j)
    for _ in range(KNOWN_AFTER):
        assert torch.equal(x.redistribute(mesh, [sw.Replicate()]).to_local(), whole)
        assert torch.equal(x.conj().redistribute(mesh, [sw.Replicate()]).to_local(), whole.conj())
    base, plain = sw.distribute_tensor(torch.arange(16.0), mesh, [sw.Interleaved(0, 2)]), torch.arange(16.0)
    view, there = base[::3], plain[::3]  # each rank had to copy
    for value in (2.0, 3.0, 4.0):
        base.mul_(value)
        plain.mul_(value)
        assert torch.equal(view.redistribute(mesh, [sw.Replicate()]).to_local(), there)


def test_what_is_not_part_of_a_spec_is_looked_at_each_time(ranks):
    ranks(2, _flags_and_copies)


def _surroundings():
    """A record, a guard, blocks that send by groups alone, and a table that was emptied."""
    mesh = rank_mesh((2,), ("tp",))
    x = _cut(mesh)

    def move():
        return x.redistribute(mesh, [sw.Replicate()]).to_local()

    _known(move)
    with sw.trace() as record:
        move()
    assert [event.op for event in record.collectives] == ["all_gather"]
    assert [event.reason.split(":")[0] for event in record.collectives] == ["redistribute"]
    with sw.guarded(patience=20.0):
        assert torch.equal(move(), _whole())
    with in_groups():
        assert torch.equal(move(), _whole())
    forget()
    assert torch.equal(move(), _whole())


def test_what_stands_around_a_known_move_is_seen(ranks):
    ranks(2, _surroundings)


def _guard_differs():
    mesh = rank_mesh((2,), ("tp",))
    x = _cut(mesh)
    _known(lambda: (x.redistribute(mesh, [sw.Replicate()]), x.redistribute(mesh, [sw.Shard(1)])))
    with (
        pytest.raises(PlanError, match="are about to run different redistributions"),
        sw.guarded(patience=20.0),
    ):
        x.redistribute(mesh, [sw.Replicate() if dist.get_rank() else sw.Shard(1)])


def test_a_guard_compares_known_moves(ranks):
    ranks(2, _guard_differs)


def _expanded():
    """What repeats one element moves as that element, as often as it is asked."""
    mesh = rank_mesh((2,), ("tp",))
    column = torch.arange(8.0).view(8, 1)
    x = sw.distribute_tensor(column, mesh, [sw.Shard(0)]).expand(8, 6)
    for _ in range(KNOWN_AFTER):
        with sw.trace() as record:
            moved = x.redistribute(mesh, [sw.Replicate()])
        assert torch.equal(moved.to_local(), column.expand(8, 6))
        assert record.bytes == column.nbytes // 2


def test_a_known_move_of_what_was_expanded_moves_it_once(ranks):
    ranks(2, _expanded)
