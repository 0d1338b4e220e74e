"""Tensors of several dtypes that are joined have the dtype and the values of one device."""

from itertools import combinations_with_replacement, product

import torch

import shardwright as sw

from .cases import close, place

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
