"""The collectives on local tensors against what the ranks' tensors say, forward and backward."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from shardwright.comm import Recorder, all_gather_uneven, all_reduce, all_to_all_uneven, record_decision
from shardwright.comm.bucket import sums_in_turn
from shardwright.comm.functional import reduce_scatter_rows
from shardwright.errors import PlanError

SPLITS = ((1, 0, 2), (0, 0, 0), (3, 1, 1))  # rows that rank i sends to rank j
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def of_rank(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(rank + 7))
    return values.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(torch.uint8)


def exchanged(dtypes):
    rank, group = dist.get_rank(), dist.group.WORLD
    sent = SPLITS[rank]
    received = [SPLITS[peer][rank] for peer in range(3)]
    for dtype in dtypes:
        everybody = [of_rank(peer, (sum(SPLITS[peer]), 2), dtype) for peer in range(3)]
        x = everybody[rank].requires_grad_(dtype.is_floating_point and dtype.itemsize > 1)
        y = all_to_all_uneven(x, received, sent, group)
        parts = [everybody[peer].detach().split(SPLITS[peer])[rank] for peer in range(3)]
        assert y.dtype == dtype
        assert bits(y).equal(bits(torch.cat([part.view(torch.uint8) for part in parts])))
        if x.requires_grad:
            weight = torch.arange(y.numel(), dtype=dtype).view(y.shape) + 10 * rank
            (y * weight).sum().backward()
            back = all_to_all_uneven(weight, sent, received, group)
            assert torch.equal(x.grad, back)


def test_rows_arrive_where_the_splits_say_and_gradients_go_back(ranks):
    ranks(3, exchanged, DTYPES)


def gathered():
    rank, group, sizes = dist.get_rank(), dist.group.WORLD, (2, 0, 5)
    everybody = [of_rank(peer, (size, 3, 2)) for peer, size in enumerate(sizes)]
    x = everybody[rank].clone().requires_grad_()
    y = all_gather_uneven(x, sizes, group)
    assert torch.equal(y, torch.cat(everybody))
    weight = torch.arange(float(y.numel())).view(y.shape) * (rank + 1)
    (gradient,) = torch.autograd.grad((y.square() / 2 * weight).sum(), x, create_graph=True)
    own = (weight / (rank + 1) * 6).split(sizes)[rank]  # 6 = 1 + 2 + 3
    torch.testing.assert_close(gradient, own * x)
    gradient.sum().backward()  # of the sum over ranks, through a gather again
    torch.testing.assert_close(x.grad, own)


def test_uneven_parts_are_gathered_and_their_gradients_summed(ranks):
    ranks(3, gathered)


def scattered():
    rank, group, sizes = dist.get_rank(), dist.group.WORLD, (2, 0, 5)
    everybody = [of_rank(peer, (7, 2)) for peer in range(3)]
    y = reduce_scatter_rows(everybody[rank], sizes, group)
    assert torch.equal(y, sum(everybody).split(sizes)[rank])
    halves = [torch.full((3, 1), 256.0), torch.full((3, 1), 1.0), torch.full((3, 1), 1.0)]
    half = reduce_scatter_rows(halves[rank].bfloat16(), (1, 1, 1), group)
    assert half.item() == 258  # one by one in bfloat16: 256


def test_rows_are_summed_in_rank_order_without_losing_small_terms(ranks):
    ranks(3, scattered)


def reduced():
    rank, group = dist.get_rank(), dist.group.WORLD
    everybody = [of_rank(peer, (4, 2)) for peer in range(3)]
    stacked = torch.stack(everybody)
    x = everybody[rank].clone().requires_grad_()
    total = all_reduce(x, "sum", group)
    assert torch.equal(total, stacked.sum(0))
    assert total.data_ptr() != x.data_ptr()
    (total * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 6.0))
    assert torch.allclose(all_reduce(x.detach(), "avg", group), stacked.mean(0))
    assert torch.equal(all_reduce(x.detach(), "max", group), stacked.amax(0))
    assert torch.equal(all_reduce(x.detach(), "product", group), stacked.prod(0))
    assert torch.equal(all_reduce(x.detach().to(torch.int16), "sum", group), stacked.sum(0).to(torch.int16))
    with pytest.raises(PlanError, match="an integer cannot hold the average"):
        all_reduce(torch.ones(2, dtype=torch.int32), "avg", group)
    with pytest.raises(PlanError, match="has no derivative here"):
        all_reduce(x, "max", group).sum().backward()


def with_nan():
    rank, group = dist.get_rank(), dist.group.WORLD
    nan = float("nan")
    everybody = torch.tensor(
        [[1.0, nan, 3.0, -2.0, 0.5], [nan, 2.0, 4.0, -1.0, 0.5], [5.0, 1.0, nan, 7.0, 0.5]]
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        stacked = everybody.to(dtype)
        for op, expected in (("max", stacked.amax(0)), ("min", stacked.amin(0)), ("sum", stacked.sum(0))):
            assert torch.equal(all_reduce(stacked[rank], op, group).nan_to_num(99), expected.nan_to_num(99))
    assert all_reduce(torch.tensor(nan if rank == 1 else 0.0), "max", group).isnan()
    assert all_reduce(torch.empty(0, 3), "max", group).shape == (0, 3)


def test_not_a_number_survives_every_reduction(ranks):
    ranks(3, with_nan)


def test_reductions_are_those_of_the_stacked_tensors(ranks):
    ranks(3, reduced)


def bucketed():
    rank, group = dist.get_rank(), dist.group.WORLD
    shapes = [(3,), (2, 2), (), (5, 1), (0, 4), (100,)]
    dtypes = [torch.float32, torch.int64, torch.float32, torch.bfloat16, torch.float32, torch.float32]
    mine = [
        of_rank(rank + i, shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    with Recorder() as seen:
        results = [*mine]
        for places, sums in sums_in_turn([*mine], [("world", group)], 64, reason="sums"):
            for place, one in zip(places, sums, strict=True):
                results[place] = one
    for i, result in enumerate(results):
        assert torch.equal(result, sum(of_rank(peer + i, shapes[i], dtypes[i]) for peer in range(2)))
        assert result.dtype == dtypes[i]
    return len(seen.collectives)


def test_buckets_hold_one_dtype_and_at_most_the_given_bytes(ranks):
    assert ranks(2, bucketed) == [4, 4]  # float32: [3] + [] + [0, 4], then [100]; int64; bfloat16


def alone():
    group, x = dist.group.WORLD, torch.arange(4.0)
    with Recorder() as seen:
        assert torch.equal(all_reduce(x, "avg", group), x)
        assert torch.equal(all_to_all_uneven(x, [4], [4], group), x)
        assert torch.equal(all_gather_uneven(x, [4], group), x)
        assert torch.equal(reduce_scatter_rows(x, [4], group), x)
    return len(seen.collectives)


def test_a_world_of_one_communicates_nothing(ranks):
    assert ranks(1, alone) == [0]


def refused():
    group, x = dist.group.WORLD, torch.ones(4, 2)
    with pytest.raises(PlanError, match="x has 4 rows, but in_splits add up to 3"):
        all_to_all_uneven(x, [1, 1], [1, 2], group)
    with pytest.raises(PlanError, match="sizes has 3 entries for a group of 2 ranks"):
        all_gather_uneven(x, [1, 1, 2], group)
    with pytest.raises(PlanError, match="x has 4 rows, but sizes says 3"):
        all_gather_uneven(x, [3, 3], group)


def test_splits_that_do_not_fit_are_refused_before_anything_is_sent(ranks):
    ranks(2, refused)


def recorded():
    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.ones(3, 2, requires_grad=True)
    splits = ([1, 2], [2, 1])
    all_reduce(x.detach(), "sum", group)  # not seen
    with Recorder() as outer:
        record_decision("aten.add", "gathered", "because")
        with Recorder() as inner:
            y = all_to_all_uneven(x, splits[rank], splits[rank], group, axis="ep", reason="dispatch")
        y.sum().backward()
    assert len(inner.collectives) == 1
    assert outer.bytes == 2 * inner.bytes
    assert inner.bytes == 2 * 2 * 4
    first, second = outer.collectives
    assert (first.op, first.axis, first.reason) == ("all_to_all", "ep", "dispatch")
    assert second.reason == "backward of dispatch"
    assert "test_collectives.py:" in first.source_line
    assert outer.decisions[0].reason == "gathered"


def test_recorders_nest_and_name_the_line_of_the_caller(ranks):
    ranks(2, recorded)


def compiled():
    # torch's compiler makes an instance of every autograd function that it traces, and warns about it.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    rank, group = dist.get_rank(), dist.group.WORLD
    for function in (
        lambda x: all_reduce(x, "sum", group) * 2,
        lambda x: all_to_all_uneven(x, [1, 3], [1, 3], group) * 2 if rank == 0 else _other_side(x, group),
        lambda x: all_gather_uneven(x, [4, 4], group) * 2,
    ):
        torch.compiler.reset()
        x, again = (of_rank(rank, (4, 4)).requires_grad_() for _ in range(2))
        expected = function(x)
        result = torch.compile(function, fullgraph=True, backend="aot_eager")(again)
        assert torch.equal(result, expected)
        expected.sum().backward()
        result.sum().backward()
        assert torch.equal(x.grad, again.grad)


def _other_side(x, group):
    return all_to_all_uneven(x, [3, 1], [3, 1], group) * 2


def test_a_compiled_graph_holds_the_collectives_whole(ranks):
    ranks(2, compiled)
