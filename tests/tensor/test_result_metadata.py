"""What an op returns is known by the call: by the types of its numbers and by what they are."""

import operator
from itertools import permutations

import pytest
import torch

import shardwright as sw
from shardwright.remember import entries
from shardwright.testing import forget
from shardwright.testing.meshes import rank_mesh

from .cases import close

NUMBERS = (1, 1.0, True, 1 + 0j)
WIDENED = {
    "div": lambda x: x / 2,
    "mul": lambda x: x * 1.5,
    "pow": lambda x: x**0.5,
    "sin": torch.sin,
    "pair": lambda x: torch.div(x, x + 1),
    "list": lambda x: torch._foreach_div([x, x], 2)[1],
    "list of two": lambda x: torch._foreach_div([x], [x + 1])[0],
}


def _numbers_of_every_type():
    mesh = rank_mesh((2,))
    plain = torch.arange(8).view(4, 2)
    x = sw.distribute_tensor(plain, mesh, [sw.Shard(0)])
    for order in permutations(NUMBERS):
        forget()
        for number in order:
            wanted = torch.full_like(plain, 2) * number
            got = torch.full_like(x, 2) * number
            assert got.dtype == got.to_local().dtype == wanted.dtype, number
            close(got, wanted, f"{number}")


def _numbers_that_leave_the_dtype():
    """torch's functions without data say a wider dtype than kernels give."""
    mesh = rank_mesh((2,))
    calls = ((torch.pow, torch.tensor([True, False, True]), True), (torch.clamp, torch.arange(3.0), 1 + 0j))
    for call, plain, number in calls:
        x = sw.distribute_tensor(plain, mesh, [sw.Shard(0)])
        for other in (2, number, 2.5, number):
            wanted, got = call(plain, other), call(x, other)
            assert sw.layout_of(got).dtype == got.to_local().dtype == wanted.dtype, (call, other)
            close(got, wanted, f"{call}, {other}")
    plain = torch.tensor([True, False, True])
    x = sw.distribute_tensor(plain, mesh, [sw.Shard(0)])
    for shift in (operator.lshift, operator.rshift):  # of bools torch's refuse them
        close(shift(x, 1), shift(plain, 1), str(shift))
        for other in (torch.tensor(3), torch.arange(3)):
            placed = sw.distribute_tensor(other, mesh, [sw.Replicate()])
            close(shift(placed, x), shift(other, plain), f"{shift} by bools")
            close(shift(x, placed), shift(plain, other), f"{shift} of bools")
        for refused in (x, x.float()):
            with pytest.raises(NotImplementedError):
                shift(refused, x)


def _other_widths():
    mesh = rank_mesh((2,))
    plain = torch.arange(8)
    x = sw.distribute_tensor(plain, mesh, [sw.Shard(0)])
    short = sw.distribute_tensor(plain[:6], mesh, [sw.Shard(0)])
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float16):
        torch.set_default_dtype(dtype)
        for name, call in WIDENED.items():
            for ours, full in ((x, plain), (short, plain[:6])):
                for _ in range(3):  # decided, known, known in C
                    got = call(ours)
                    assert got.dtype == sw.layout_of(got).dtype == got.to_local().dtype == dtype, name
                close(got, call(full), name)
                close(got.redistribute(mesh, [sw.Replicate()]) + 1, call(full) + 1, name)
    torch.set_default_dtype(torch.float32)


def _deterministic():
    """torch's functions for tensors without data refuse these as CUDA does; CPUs take them."""
    x, mesh = torch.arange(8.0).view(4, 2), rank_mesh((2,))
    torch.use_deterministic_algorithms(True)
    for op in (lambda x: x.median(1)[0], lambda x: x.nanmedian(1)[0], lambda x: x.mode(1)[0], torch.histc):
        close(op(sw.distribute_tensor(x, mesh, [sw.Shard(0)])), op(x))
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


def _once_for_all_layouts():
    """Another layout of operands is no other question."""
    mesh = rank_mesh((2,))
    counts = []
    forget()
    for placement in (sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Owner(1)):
        x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [placement])
        close(torch.sin(x), torch.sin(torch.arange(8.0).view(4, 2)), str(placement))
        counts.append(entries()["metadata of results"])
    assert counts[0] == counts[-1] > 0, counts


def _sums_over_no_dim_named():
    """An empty list of dims means all; torch's function without data says of nansum that it means none."""
    plain, mesh = torch.tensor([[1.0, torch.nan], [2.0, 3.0], [torch.nan, 4.0]]), rank_mesh((2,))
    for placement in (sw.Shard(0), sw.Shard(1), sw.Replicate(), sw.Partial("max")):
        x = sw.distribute_tensor(plain.nan_to_num(9) if placement.is_partial() else plain, mesh, [placement])
        for keepdim in (False, True):
            for dtype in (None, torch.float64):
                got = x.nansum(dim=[], keepdim=keepdim, dtype=dtype)
                close(got, x.full_tensor().nansum(dim=[], keepdim=keepdim, dtype=dtype), str(placement))


def test_an_empty_list_of_dims_means_all(ranks):
    ranks(2, _sums_over_no_dim_named)


def test_numbers_of_other_types_give_other_dtypes_whichever_came_first(ranks):
    ranks(2, _numbers_of_every_type)


def test_a_number_that_leaves_the_dtype_as_it_is(ranks):
    ranks(2, _numbers_that_leave_the_dtype)


def _operands_of_other_dtypes():
    mesh = rank_mesh((2,))
    x, wide, dropped = (
        torch.ones(5),
        torch.ones(5, dtype=torch.float64),
        torch.ops.aten.native_dropout_backward,
    )
    for call, *plain in ((torch.addr, torch.ones(5, 4), wide, torch.ones(4)), (dropped, x, wide, 2.0)):
        given = (
            sw.distribute_tensor(v, mesh, [sw.Shard(0)]) if isinstance(v, torch.Tensor) else v for v in plain
        )
        wanted, got = call(*plain), call(*given)
        assert sw.layout_of(got).dtype == got.to_local().dtype == wanted.dtype, call
        close(got, wanted, str(call))


def test_operands_of_other_dtypes_promote_as_kernels_do(ranks):
    ranks(2, _operands_of_other_dtypes)


def test_the_default_dtype_is_part_of_the_call(ranks):
    ranks(2, _other_widths)


def test_a_call_is_asked_once_for_all_layouts(ranks):
    ranks(2, _once_for_all_layouts)


def test_what_a_cpu_does_deterministically_is_not_refused(ranks):
    ranks(2, _deterministic)
