"""Kernels of torch that break on a rank's part, where they do not on one device."""

import warnings

import torch

import shardwright as sw

from .cases import close, full, place


def _products_of_rows():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for red in ("prod", "mean", "amax"):
            for cut in (sw.Replicate(), sw.Shard(0), sw.Shard(1)):
                for name in ("index_reduce", "index_reduce_"):
                    x, source = full(5, 2).to(dtype), full(3, 2, seed=1).to(dtype)
                    index = torch.tensor([1, 3, 1])
                    ours = place(x.clone(), (cut,))
                    parts = place(index, (sw.Replicate(),)), place(source, (sw.Shard(0),))
                    with warnings.catch_warnings(action="ignore"):  # torch calls it new
                        wanted = getattr(x, name)(0, index, source, red)
                        got = getattr(ours, name)(0, *parts, red)
                    close(got, wanted, f"{dtype} {red} {cut} {name}")
                    close(ours, x)


def test_half_products_by_index_in_parts_of_one_column(ranks):
    ranks(2, _products_of_rows)
