"""A placement that nobody edited the library for works on real ranks, from distribute to checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from shardwright.errors import LayoutError
from shardwright.placement import Box, Partition, Pending, Region, Shard
from shardwright.testing import rank_mesh
from tests.placement.user_placements import Band, Checkerboard, LogSumExp, LongerDim, PermutedRows

KINDS = {"rows": PermutedRows(7), "band": Band(), "tiles": Checkerboard(2)}
SHAPE = (7, 6)


@pytest.fixture(params=list(KINDS))
def kind(request):
    return request.param


def mesh_of(sw, *sizes):
    return rank_mesh(sizes, ("dp", "tp")[: len(sizes)])


def full_tensor():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def redistributed(kind):
    import shardwright as sw

    placement, mesh, full = KINDS[kind], mesh_of(sw, 2, 2), full_tensor()
    x = sw.distribute_tensor(full, mesh, {"dp": placement})
    assert torch.equal(x.full_tensor(), full)
    targets = (
        [sw.Shard(0), sw.Shard(1)],
        [sw.Replicate(), placement],
        [placement, sw.Shard(1)],
        [sw.Partial(), sw.Shard(0)],
        [sw.Owner(1), sw.ZigZag(0)],
        [sw.Ragged((1, 2), (0, 1)), sw.Partial("max")],
        [placement, placement],
    )
    for target in targets:
        there = x.redistribute(mesh, target)
        assert there.placements == tuple(target)
        assert torch.equal(there.full_tensor(), full), target
        assert torch.equal(
            there.redistribute({"dp": placement, "tp": sw.Replicate()}).to_local(), x.to_local()
        )
        assert torch.equal(sw.distribute_tensor(full, mesh, target).full_tensor(), full), target


def test_it_is_redistributed_to_and_from_everything(ranks, kind):
    ranks(4, redistributed, kind)


def trained(kind):
    import shardwright as sw
    from shardwright.grads import clip_grad_norm_

    placement, mesh, full = KINDS[kind], mesh_of(sw, 2, 2), full_tensor()
    ours = nn.Parameter(sw.distribute_tensor(full, mesh, {"dp": placement}))
    theirs = nn.Parameter(full.clone())
    optimizers = [torch.optim.AdamW([p], lr=0.1) for p in (ours, theirs)]
    for _ in range(3):
        for p in (ours, theirs):
            p.grad = None
            ((p * 2 + 1).relu() * p).sum().backward()
        assert ours.grad.placements[0] == placement
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=0, atol=0)
        mine, reference = clip_grad_norm_([ours], 0.5), nn.utils.clip_grad_norm_([theirs], 0.5)
        torch.testing.assert_close(torch.as_tensor(mine), reference)
        for optimizer in optimizers:
            optimizer.step()
    assert ours.placements[0] == placement
    torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-6, atol=1e-6)


def test_it_trains_with_clipping_and_adamw(ranks, kind):
    ranks(4, trained, kind)


class Model(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


def saved(kind, folder):
    import shardwright as sw
    from shardwright.checkpoint import save

    weight = sw.distribute_tensor(full_tensor(), mesh_of(sw, 2, 2), {"dp": KINDS[kind], "tp": sw.Shard(0)})
    save(folder, model=Model(weight), step=1)


def loaded(kind, folder):
    import shardwright as sw
    from shardwright.checkpoint import load

    for placements in ({"dp": KINDS[kind]}, {"dp": sw.Shard(1)}):
        empty = sw.distribute_tensor(torch.zeros(SHAPE), mesh_of(sw, 3), placements)
        model = Model(empty)
        load(folder, model=model)
        assert torch.equal(model.weight.full_tensor(), full_tensor())


def test_a_checkpoint_of_it_is_read_on_another_mesh(ranks, kind, tmp_path):
    ranks(4, saved, kind, tmp_path / "checkpoint")
    ranks(3, loaded, kind, tmp_path / "checkpoint")


def drawn(kind):
    import shardwright as sw

    x = sw.distribute_tensor(full_tensor(), mesh_of(sw, 2), {"dp": KINDS[kind]})
    return sw.visualize(x).text


def test_it_is_drawn(ranks, kind):
    first, second = ranks(2, drawn, kind)
    assert first == second
    assert type(KINDS[kind]).__name__ in first


def copied():
    import shardwright as sw

    mesh, pending, full = mesh_of(sw, 2), LogSumExp(2.0), full_tensor()
    x, y = (sw.distribute_tensor(t, mesh, [pending]) for t in (full, full + 1))
    with sw.explicit():  # nothing is finished: the terms are copied
        assert x.clone().placements == x.copy_(y).placements == (pending,)
    torch.testing.assert_close(x.full_tensor(), full + 1)
    made = torch.compile(lambda x: x.fill_(3.0) * 2, backend="aot_eager")(x)
    assert x.placements == (pending,)
    torch.testing.assert_close(x.full_tensor(), torch.full(SHAPE, 3.0))
    torch.testing.assert_close(made.full_tensor(), torch.full(SHAPE, 6.0))


def test_a_pending_value_without_a_name_is_copied_as_it_is(ranks):
    ranks(2, copied)


@dataclass(frozen=True)
class PairOfDims(Partition):
    """Runs of the elements of dims `dim` and `dim + 1`, flat, on the latter: it cuts both."""

    dim: int

    def region(self, shape, n, coord):
        piece = -(-shape[0] * shape[1] // n)
        held = range(min(coord * piece, shape[0] * shape[1]), min((coord + 1) * piece, shape[0] * shape[1]))
        return Region([Box(divmod(at, shape[1]), (1, 1)) for at in held], (1, len(held)))


@dataclass(frozen=True)
class RowsOfWidth(Partition):
    """Rows; its `dim` is a size of the model."""

    dim: int

    def region(self, shape, n, coord):
        return Shard(0).region(shape, n, coord)


@dataclass(frozen=True)
class ReversedRows(RowsOfWidth):
    def region(self, shape, n, coord):
        return Shard(0).region(shape, n, n - 1 - coord)


def told_of_parts():
    import shardwright as sw

    mesh, full = mesh_of(sw, 3), torch.arange(24.0).view(6, 4)
    for placement, is_told in ((PairOfDims(0), False), (RowsOfWidth(5), False), (ReversedRows(0), True)):
        x = sw.distribute_tensor(full, mesh, [placement])
        doubled = sw.local_map(
            lambda part: part * 2, out_placements=[placement], in_placements=([placement],), device_mesh=mesh
        )
        for made, want in (
            (lambda: sw.DTensor.from_local(x.to_local(), mesh, [placement]), full),  # noqa: B023 - called here
            (lambda: doubled(x), full * 2),  # noqa: B023
        ):
            if is_told:
                assert torch.equal(made().full_tensor(), want)
            else:
                with pytest.raises(LayoutError, match=r"infer the logical shape|do not tell of which tensor"):
                    made()


def test_a_shape_is_told_by_parts_only_where_dim_is_the_dim_that_is_cut(ranks):
    ranks(3, told_of_parts)


def repeated_elements():
    """What is expanded moves as what it was expanded from, where the parts of that are known."""
    import shardwright as sw

    mesh = mesh_of(sw, 2, 2)
    column = torch.arange(4.0).view(4, 1)
    for placement in (LongerDim(), Checkerboard(2)):
        x = sw.distribute_tensor(column, mesh, [sw.Replicate()] * 2).expand(4, 3)
        assert torch.equal(x.redistribute(mesh, [Shard(0), placement]).full_tensor(), column.expand(4, 3))
        y = sw.distribute_tensor(torch.ones(1, 4), mesh, [Shard(0), placement]).requires_grad_()
        (y * y).sum().backward()
        assert torch.equal(y.grad.full_tensor(), torch.full((1, 4), 2.0))


def test_repeated_elements_reach_placements_that_look_at_the_shape(ranks):
    ranks(4, repeated_elements)


@dataclass(frozen=True)
class GeometricMean(Pending):
    """Of positive numbers."""

    def combine(self, locals):  # noqa: A002  the name in sw.Pending
        return torch.stack(list(locals)).log().mean(0).exp()

    def embed(self, x, n, coord):
        return x.clone()

    def in_domain(self, x):
        return x.is_floating_point() and bool((x > 0).all())


def positive_terms():
    import shardwright as sw

    mesh = mesh_of(sw, 3)
    x = sw.distribute_tensor(torch.tensor([1.0, 2.0, 5.0]), mesh, [Shard(0)])
    moved = x.redistribute(mesh, [GeometricMean()])
    torch.testing.assert_close(moved.full_tensor(), torch.tensor([1.0, 2.0, 5.0]))


def test_a_domain_need_not_hold_zero(ranks):
    ranks(3, positive_terms)
