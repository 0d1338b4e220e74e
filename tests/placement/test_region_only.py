"""A partition that states only its region along one dim gets every rule of the family, at the same cost."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional

from shardwright.errors import PlacementError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Moved, Replicate, Shard
from shardwright.placement.one_dim_form import one_dim_form
from shardwright.rules import TensorInfo, propagate
from shardwright.rules.call import Call
from shardwright.testing import rank_mesh
from tests.placement.user_placements import (
    Backwards,
    Band,
    Checkerboard,
    Columns,
    ColumnsByRows,
    ElementsBackwards,
    LongerDim,
    RowsInTurn,
    Skewed,
    WrongElsewhere,
    WrongOnDim,
)
from tests.tiers import all_but

aten = torch.ops.aten
LINE = MeshShape(("tp",), (2,))


@pytest.mark.parametrize(
    ("placement", "shape", "form"),
    [
        (RowsInTurn(), (6, 4), (0, RowsInTurn())),
        (RowsInTurn(), (1, 4), (0, RowsInTurn())),  # one coord holds it all: still a cut of rows
        (RowsInTurn(), (0, 4), (0, RowsInTurn())),
        (RowsInTurn(), (4, 0), (0, RowsInTurn())),
        (Backwards(2), (3, 2, 5), (2, Backwards(0))),
        (Columns(), (4, 6), (1, Moved(0, Columns(), 2, 1))),
        (LongerDim(), (6, 4), None),
        (Band(), (6, 4), None),
        (Skewed(), (6, 4), None),
        (ColumnsByRows(), (6, 4), (1, Moved(0, ColumnsByRows(), 2, 1))),
    ],
    ids=str,
)
def test_the_dim_is_found_from_the_region(placement, shape, form):
    assert one_dim_form(placement, shape, 2) == form


def decided(op, *operands):
    """How a call is run: the layouts of operands and of the first result."""
    layouts = [Layout(LINE, [p], shape, dtype=torch.float32) for p, shape in operands]
    infos = [TensorInfo(x.shape, x.stride, x.dtype) for x in layouts]
    results = op(*(torch.empty(x.shape) for x in layouts))
    made = (TensorInfo(tuple(results.shape), results.stride(), results.dtype),)
    decision = propagate(Call(op, tuple(infos), (), made), layouts)
    assert decision.inputs == tuple(layouts), "something was moved"
    return decision.outputs[0].placements[0]


def test_a_matmul_with_a_region_only_operand_moves_nothing():
    replicate = Replicate()
    assert decided(aten.mm.default, (RowsInTurn(), (6, 4)), (replicate, (4, 5))) == RowsInTurn()
    assert decided(aten.mm.default, (replicate, (6, 4)), (Backwards(1), (4, 5))) == Backwards(1)
    assert decided(aten.mm.default, (replicate, (6, 4)), (Columns(), (4, 5))) == Columns()
    pending = decided(aten.mm.default, (Backwards(1), (6, 4)), (Backwards(0), (4, 5)))
    assert pending.is_pending
    assert decided(aten.t.default, (RowsInTurn(), (6, 4))) == Moved(1, RowsInTurn(), 1, 0)
    assert decided(aten.t.default, (Moved(1, RowsInTurn(), 1, 0), (4, 6))) == RowsInTurn()


def test_a_cut_moved_along_a_dim_is_called_by_its_own_class_where_that_says_the_same():
    layout = Layout(LINE, [Moved(0, RowsInTurn(), 1, 0)], (6, 4), dtype=torch.float32)
    assert layout.placements == (RowsInTurn(),)
    assert Layout.parse(str(layout), LINE) == layout
    moved = Layout(LINE, [Moved(1, RowsInTurn(), 1, 0)], (6, 4), dtype=torch.float32)
    assert str(moved) == "f32[6, 4] {tp: Moved(1, RowsInTurn(), 1, 0)}"
    assert Layout.parse(str(moved), LINE) == moved


@pytest.mark.parametrize("moved", [Moved(0, Checkerboard(2), 2, 0), Moved(0, Shard(0), 1, 1)])
def test_a_cut_of_other_dims_cannot_be_moved(moved):
    with pytest.raises(PlacementError, match=r"does not cut dim|has no dim"):
        Layout(LINE, [moved], (6,), dtype=torch.float32)


@pytest.mark.parametrize(
    ("wrong", "call"),
    [(WrongOnDim(), "mm"), (WrongElsewhere(), "transposed")],
    ids=lambda value: getattr(value, "text", str)() if not isinstance(value, str) else value,
)
def test_an_on_dim_that_contradicts_the_region_is_refused(wrong, call):
    op, others = (aten.mm.default, [(Replicate(), (4, 5))]) if call == "mm" else (aten.t.default, [])
    with pytest.raises(PlacementError, match=rf"{type(wrong).__name__}\.on_dim\(.\) is S\(.\), which cuts"):
        decided(op, (wrong, (6, 4)), *others)


# ------------------------------------------------------------------------------------------ on ranks

PLACED = {
    "every nth": RowsInTurn(),
    "backwards": Backwards(0),
    "backwards inside": Backwards(1),
    "columns": Columns(),
    "longer dim": LongerDim(),
    "skewed": Skewed(),
    "skewed, in other boxes": Skewed(halves=True),
    "columns by rows": ColumnsByRows(),
}


def programs(x, w, table, index):
    """Results of whole programs of x [7, 6] and w [6, 5]."""
    y = x @ w
    yield y
    yield torch.softmax(y, 1) + torch.softmax(x, 0).sum(0)[:5]
    yield functional.layer_norm(x, (6,)).t() @ x
    yield (x.t() @ y).relu().amax(0)
    yield x.view(7, 2, 3).permute(2, 0, 1).sum(1)
    yield x.reshape(-1)[3:31].view(4, 7).cumsum(1)
    yield x[2:6, 1:].t().exp()
    yield torch.cat([x, x * 2], 0).view(2, 7, 6).mean(0)
    yield x[:, None, :].expand(7, 3, 6).flatten(1).std(1)
    yield functional.embedding(index, table) * x[0]
    yield torch.gather(x, 1, index[:7, None] % 6) + x.argmax(1, keepdim=True)
    yield functional.cross_entropy(y, index[:7] % 5)
    z = x.clone()
    z[1:4] += 1
    z.mul_(x).t().add_(x.t())
    yield z
    yield torch.sort(x, 0).values.var(1)
    yield x.unbind(0)[3] + x.chunk(3, 1)[1].sum()


def whole_programs(name):
    import shardwright as sw

    placement = PLACED[name]
    mesh = rank_mesh((2,), ("tp",))
    seeded = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=seeded, dtype=torch.float64) for shape in ((7, 6), (6, 5), (9, 6))]
    index = torch.randint(9, (8,), generator=seeded)
    wanted = [p.clone().requires_grad_() for p in plain]
    placed = [sw.distribute_tensor(p, mesh, [placement]).requires_grad_() for p in plain]
    placed_index = sw.distribute_tensor(index, mesh, [sw.Replicate()])
    one_device, ours = list(programs(*wanted, index)), list(programs(*placed, placed_index))
    for at, (single, global_) in enumerate(zip(one_device, ours, strict=True)):
        torch.testing.assert_close(global_.full_tensor(), single, msg=lambda m, at=at: f"program {at}: {m}")
    sum(y.square().sum() for y in one_device).backward()
    sum(y.square().sum() for y in ours).backward()
    for single, global_ in zip(wanted, placed, strict=True):
        torch.testing.assert_close(global_.grad.full_tensor(), single.grad)
        assert sw.distribute_tensor(single.grad, mesh, [placement]).to_local().shape == (
            global_.grad.redistribute(placements=[placement]).to_local().shape
        )
    whole = sw.distribute_tensor(plain[1], mesh, [sw.Replicate()])
    of_one_dim = one_dim_form(placement, (7, 6), 2) is not None
    with sw.trace() as trace, sw.explicit() if of_one_dim else contextlib.nullcontext():
        placed[0] @ whole
    return trace.bytes


@pytest.mark.parametrize("name", all_but(["backwards", "columns", "skewed, in other boxes"], PLACED))
def test_whole_programs_equal_one_device(ranks, name):
    sent = ranks(2, whole_programs, name)
    if name == "every nth":
        assert sent == [0, 0]


def on_two_axes():
    """What a class cuts may depend on the shape that earlier axes leave it."""
    import shardwright as sw

    mesh = rank_mesh((2, 2), ("dp", "tp"))
    x = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    w = torch.arange(20.0, dtype=torch.float64).view(4, 5)
    layouts = [
        [sw.Shard(0), LongerDim()],  # of 6 x 4 it cuts rows, of 3 x 4 columns
        [sw.Shard(0), RowsInTurn()],
        [RowsInTurn(), Backwards(1)],
        [Backwards(1), Columns()],
        [sw.Ragged((1, 2), (0, 1)), RowsInTurn()],
    ]
    for placements in layouts:
        d = sw.distribute_tensor(x, mesh, placements)
        for single, ours in (
            (x @ w, d @ sw.distribute_tensor(w, mesh, [sw.Replicate()] * 2)),
            (x.t(), d.t()),
            (x[1:5].t().reshape(-1), d[1:5].t().reshape(-1)),
            (x.sum(0), d.sum(0)),
            (x.softmax(0), d.softmax(0)),
            (x.view(2, 3, 4).permute(2, 0, 1), d.view(2, 3, 4).permute(2, 0, 1)),
            (x.cumsum(0), d.cumsum(0)),
        ):
            torch.testing.assert_close(ours.full_tensor(), single, msg=lambda m, p=placements: f"{p}: {m}")


def test_the_shape_that_earlier_axes_leave_decides(ranks):
    ranks(4, on_two_axes)


def where_nothing_is_left():
    """An earlier axis leaves one coord no column: what is empty there is empty in another dim."""
    import shardwright as sw

    mesh = rank_mesh((2, 2), ("dp", "tp"))
    a, b = torch.arange(4.0).view(4, 1), torch.full((1, 1), 2.0)
    x = sw.distribute_tensor(a, mesh, [sw.Shard(1), ElementsBackwards()])
    y = sw.distribute_tensor(b, mesh, [sw.Shard(1), sw.Replicate()])
    for ours, single in ((x + y, a + b), (x * 2, a * 2), (x.sum(0), a.sum(0)), (x.t() @ x, a.t() @ a)):
        assert torch.equal(ours.full_tensor(), single)


def test_a_part_may_be_empty_in_another_dim_than_the_one_that_is_cut(ranks):
    ranks(4, where_nothing_is_left)
