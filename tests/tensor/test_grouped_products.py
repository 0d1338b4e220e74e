"""Grouped products in every dtype of the kernel, cut along every dim: values and gradients of one device."""

import itertools

import pytest
import torch
from torch.nn import functional

import shardwright as sw
from shardwright.testing.meshes import rank_mesh
from tests.tiers import only

# Per form of the operands: shapes, offsets, and the cuts of both operands that are tried. Rows that begin at
# multiples of the kernel's alignment, parts of them that do not.
_FORMS = {
    "rows": ((9, 16), (3, 16, 8), [2, 5, 9], [(0, 1), (1, 1), (1, 2), (0, 0), (1, None), (None, 2)]),
    "contracted": ((16, 8), (8, 24), [3, 4, 8], [(0, 1), (1, 0), (None, 1), (0, None)]),
    "batches": ((3, 8, 16), (3, 16, 8), None, [(0, 0), (1, 2), (2, 1), (1, None)]),
    "columns": ((3, 8, 16), (16, 24), [4, 9, 24], [(1, 1), (2, 0), (0, 1), (1, None)]),
}
# Half types differ in the kernel alone: each with forms that group rows and that add.
_QUICK = [
    *((form, torch.float32) for form in _FORMS),
    ("rows", torch.bfloat16),
    ("contracted", torch.bfloat16),
    ("rows", torch.float16),
]


def _operands(form, dtype, *, turned):
    left, right, ends, cuts = _FORMS[form]
    make = torch.Generator().manual_seed(0)
    a = torch.randn(left, generator=make).to(dtype)
    b = torch.randn(right, generator=make).to(dtype)
    if turned:  # as a linear layer's weight: the same values, columns side by side
        b = b.mT.contiguous().mT
    return a, b, None if ends is None else torch.tensor(ends, dtype=torch.int32), cuts


def _product(a, b, offs):
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    out = functional.grouped_mm(a, b, offs=offs)
    out.square().sum().backward()
    return out.detach(), a.grad, b.grad


def _placement(dim):
    return (sw.Replicate() if dim is None else sw.Shard(dim),)


def _like_one_device(form, dtype):
    mesh = rank_mesh((2,), ("tp",))
    for turned in (False, True):
        a, b, offs, cuts = _operands(form, dtype, turned=turned)
        wanted = _product(a, b, offs)
        for left, right in cuts:
            placed = (sw.distribute_tensor(x, mesh, _placement(dim)) for x, dim in ((a, left), (b, right)))
            ends = None if offs is None else sw.distribute_tensor(offs, mesh, (sw.Replicate(),))
            for got, one in zip(_product(*placed, ends), wanted, strict=True):
                full = got.full_tensor()
                assert full.dtype == one.dtype
                scale = one.float().abs().max()
                limit = 1e-5 if dtype == torch.float32 else 2e-2
                assert (full.float() - one.float()).abs().max() <= limit * scale, (turned, left, right)


@pytest.mark.parametrize(
    ("form", "dtype"), only(_QUICK, itertools.product(_FORMS, (torch.float32, torch.bfloat16, torch.float16)))
)
def test_a_grouped_product_is_that_of_one_device(ranks, form, dtype):
    ranks(2, _like_one_device, form, dtype)
