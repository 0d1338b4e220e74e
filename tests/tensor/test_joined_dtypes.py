"""Tensors of several dtypes that are joined have the dtype and the values of one device."""

from itertools import combinations_with_replacement, product

import torch
import torch.distributed as dist

import shardwright as sw

from .cases import close, mesh, place

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64)


def _joined():
    for at, pair in enumerate(combinations_with_replacement(DTYPES, 2)):
        one, two = pair if at % 2 else pair[::-1]  # the first and the second is the wider one in turn
        plain = [(torch.arange(8).view(4, 2) + 2**-12).to(dtype) for dtype in (one, two)]
        for cut, join, dim in product(
            (sw.Shard(0), sw.Shard(1), sw.Owner(1)), (torch.cat, torch.stack), (0, 1)
        ):
            wanted = join(plain, dim)
            got = join([place(x, (cut,)) for x in plain], dim)
            name = f"{join.__name__} of {one} and {two} along {dim}, {cut}"
            assert got.dtype == got.to_local().dtype == wanted.dtype, name
            close(got, wanted, name)


def test_what_is_joined_of_several_dtypes_has_the_dtype_of_one_device(ranks):
    ranks(2, _joined, timeout=120)


def _joined_terms():
    """Terms of bytes add up to more than a byte, those of halves to more digits than a half has."""
    for narrow in (torch.int8, torch.bfloat16):
        parts = [torch.tensor([[100, 90], [0.125, 3]]).to(narrow), torch.full((2, 2), 101, dtype=narrow)]
        plain = parts[0] + parts[1]
        wide = torch.arange(4.0).view(2, 2)
        terms = parts[dist.get_rank()], wide * (2 - 3 * dist.get_rank())
        pending = [sw.DTensor.from_local(term, mesh(), [sw.Partial()]) for term in terms]
        for join in (torch.cat, torch.stack, torch.hstack):
            assert torch.equal(join(pending).full_tensor(), join([plain, wide])), (join, narrow)


def test_terms_are_combined_in_their_own_dtype_before_they_are_joined_with_wider_ones(ranks):
    ranks(2, _joined_terms)
