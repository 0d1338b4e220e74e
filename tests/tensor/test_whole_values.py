"""Where torch needs whole values: `out=` of composed functions, changed sizes, values that the host reads."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.errors import ImplicitRedistributionError
from tests.tensor.cases import full, mesh, place, whole


def placed(x, dim=0):
    return place(x, [sw.Shard(dim)] * mesh().ndim)


def _composed_functions_fill_what_they_are_given():
    x, y = full(6, 5), full(5, 4, seed=1)
    for function, operands in ((torch.msort, (x,)), (torch.kron, (x, y)), (torch.linalg.svdvals, (x,))):
        wanted = function(*operands)
        for like in (wanted, wanted.new_empty(0), wanted.double()):
            out = placed(torch.ones_like(like))
            before = out.placements
            result = function(*(placed(v) for v in operands), out=out)
            assert result is out
            assert out.placements == before or not like.numel()
            torch.testing.assert_close(whole(out), wanted.to(like.dtype), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.msort(placed(x), out=placed(torch.ones(6, 5, dtype=torch.int64)))
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.msort(placed(x).requires_grad_(), out=placed(torch.ones(6, 5)))
    folded = torch.ones(2, 5, 4)
    torch.matmul(full(2, 5, 3), full(3, 4), out=folded)
    out = placed(torch.ones(2, 5, 4), dim=1)
    torch.matmul(placed(full(2, 5, 3), dim=1), placed(full(3, 4)), out=out)
    torch.testing.assert_close(whole(out), folded)


def _kernels_fill_what_has_another_size():
    """By a rule, by an algorithm (rows are cut), on whole operands, and where the data tell the size."""
    x, y = full(4, 6), full(4, 6, seed=1)
    for function, operands in (
        (lambda x, y, out: torch.cat([x, y], out=out), (x, y)),
        (lambda x, out: torch.tril(x, out=out), (x,)),
        (lambda x, out: torch.cumsum(x, 0, out=out), (x,)),
        (lambda x, out: torch.logsumexp(x, 0, out=out), (x,)),
        (lambda x, out: torch.linalg.vector_norm(x, dim=0, out=out), (x,)),
        (lambda x, y, out: torch.masked_select(x, y > 0, out=out), (x, y)),
    ):
        for given in (torch.empty(0), torch.ones(2, 6)):
            wanted = given.clone()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that it resizes what is not empty
                function(*operands, out=wanted)
                out = placed(given)
                assert function(*(placed(v) for v in operands), out=out) is out
            assert out.shape == wanted.shape
            torch.testing.assert_close(whole(out), wanted, rtol=1e-5, atol=1e-5)


def test_what_has_another_size_is_resized_and_filled(ranks):
    ranks(2, _kernels_fill_what_has_another_size)


def _made_of_no_data():
    empty = torch.ones(3, 0, 2)
    rank = torch.linalg.matrix_rank(placed(empty))
    assert isinstance(rank, sw.DTensor)
    assert torch.equal(whole(rank), torch.linalg.matrix_rank(empty))
    given = torch.zeros(6, 4)
    assert torch.add(placed(full(6, 4)), 1, out=given) is given


def test_a_result_that_torch_makes_of_no_data_is_distributed(ranks):
    """A plain tensor that was given and filled stays what it is."""
    ranks(2, _made_of_no_data)


def _norms_of_every_order():
    x = full(6, 5) * 3
    for order in (float("inf"), -float("inf"), 0, 1, 2, 3, -1):
        out = place(torch.ones(()), [sw.Replicate()] * mesh().ndim)
        torch.linalg.vector_norm(placed(x), order, out=out)
        torch.testing.assert_close(whole(out), torch.linalg.vector_norm(x, order))


def test_a_norm_of_any_order_fills_what_it_is_given(ranks):
    """A finished `out` is another problem than a pending result: the norm is reduced at once."""
    ranks(2, _norms_of_every_order)


def test_a_composed_function_fills_what_it_is_given(ranks):
    """Any layout of `out`, also one of no elements; what torch refuses is refused."""
    ranks(2, _composed_functions_fill_what_they_are_given)


def _sizes_change():
    x = full(6, 4)
    for size in ((3, 4), (4, 3), (24,), (2, 3, 4)):
        grown = placed(x).clone()
        assert grown.resize_(size) is grown
        assert tuple(grown.shape) == size
        torch.testing.assert_close(whole(grown), x.clone().resize_(size))
        torch.testing.assert_close(whole(grown + 1), x.clone().resize_(size) + 1)
    like = placed(x).resize_as_(placed(full(2, 4)))
    assert like.placements == (sw.Shard(0),) * mesh().ndim


def test_a_resized_tensor_keeps_its_elements_in_order(ranks):
    """`resize_` has the single-device meaning, and keeps placements that still fit."""
    ranks(2, _sizes_change)


def _the_host_reads():
    x = full(5, 3)
    with sw.trace() as trace:
        assert placed(x).tolist() == x.tolist()
    assert any("host reads" in d.reason for d in trace.decisions)
    assert place(x, [sw.Partial("sum")] * mesh().ndim).numpy().shape == (5, 3)
    points = torch.tensor([1, 4])
    wanted = torch.tensor_split(x, points)
    got = torch.tensor_split(placed(x), placed(points))
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(whole(g), w)
    with sw.explicit(), pytest.raises(ImplicitRedistributionError):
        placed(x).tolist()
    for y in (x, x.long(), x > 3, x.to(torch.complex64)):
        d = placed(y)  # read by torch's C, which has turned dispatch to Python off
        for make in (torch.tensor, torch.as_tensor, torch.asarray, y.new_tensor):
            torch.testing.assert_close(make([d.sum(), [*d[1]][-1]]), make([y.sum(), y[1, -1]]))


def test_the_host_reads_the_finished_value(ranks):
    """`tolist`, `numpy`, split points in a tensor: recorded, and refused where nothing may be implicit."""
    ranks(2, _the_host_reads)


def _shapes_come_from_the_result():
    table, index, offsets = full(7, 3), torch.tensor([1, 2, 4, 5, 0, 6]), torch.tensor([0, 2, 5])
    wanted = functional.embedding_bag(index, table, offsets)
    got = functional.embedding_bag(placed(index), placed(table), placed(offsets))
    torch.testing.assert_close(whole(got), wanted)
    times = torch.tensor([1, 0, 2])
    got = torch.repeat_interleave(placed(full(3, 2)), placed(times), dim=0)
    torch.testing.assert_close(whole(got), torch.repeat_interleave(full(3, 2), times, dim=0))
    ends = placed(torch.tensor([0.0, 3.0])).unbind()
    line = torch.linspace(*ends, 5)
    assert isinstance(line, sw.DTensor)
    torch.testing.assert_close(whole(line), torch.linspace(0, 3, 5))
    masked = torch.masked.std(placed(full(5, 3)), 0, mask=placed(full(5, 3) > 0))
    wanted = torch.masked.std(full(5, 3), 0, mask=full(5, 3) > 0)
    torch.testing.assert_close(whole(masked), wanted, equal_nan=True)


def test_an_op_without_a_rule_says_its_shape_by_its_result(ranks):
    """The kernel without data may disagree with the kernel of the device, or not exist."""
    ranks(2, _shapes_come_from_the_result)


def _numbers_of_a_view_whose_history_is_refused():
    """torch refuses the graph of a view that was written without one; the host asks for numbers only."""
    for made in (lambda x: x, placed):
        x = made(torch.arange(4.0)).requires_grad_()
        (view,) = x.chunk(1)
        with torch.no_grad():
            view.mul_(2)
        assert view.tolist() == [0, 2, 4, 6]


def test_a_list_is_read_without_a_graph(ranks):
    ranks(2, _numbers_of_a_view_whose_history_is_refused)


def _a_dtype_beside_out():
    plain = torch.arange(6.0).view(3, 2)
    for dim in (0, 1):
        target = placed(torch.zeros(3, 2))
        torch.softmax(placed(plain), dim, dtype=torch.float32, out=target)
        torch.testing.assert_close(target.full_tensor(), torch.softmax(plain, dim))


def test_softmax_takes_a_dtype_beside_out(ranks):
    ranks(2, _a_dtype_beside_out)


def _a_function_of_python():
    for cut in (sw.Shard(0), sw.Replicate(), sw.Partial("sum"), sw.Owner(1)):
        plain = torch.arange(6.0).view(3, 2)
        ours = place(plain, (cut,))
        rows, placements = ours[1], ours.placements
        for x in (plain, ours):
            assert x.apply_(lambda element: element * element + 1) is x
        assert ours.placements == placements
        torch.testing.assert_close(whole(ours), plain)
        torch.testing.assert_close(whole(rows), plain[1])
    with pytest.raises(RuntimeError, match="requires grad"):
        ours.requires_grad_().apply_(lambda element: element)


def test_a_function_of_python_is_applied_to_each_element(ranks):
    """It had ended the process: torch went to the address of a tensor that has none."""
    ranks(2, _a_function_of_python)
