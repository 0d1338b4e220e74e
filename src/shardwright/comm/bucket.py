"""Many tensors, few collectives: tensors of one dtype are reduced as flat buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwright.comm import functional
from shardwright.compat import flatten_dense_tensors, unflatten_dense_tensors

DEFAULT_BUCKET_BYTES = 25 * 2**20


def sums_in_turn(
    tensors: list[Tensor], groups: Sequence[tuple[str, ProcessGroup]], bucket_bytes: int, *, reason: str
) -> Iterator[tuple[list[int], Sequence[Tensor]]]:
    """One bucket after another: the places of its tensors, and their sums over the groups of all axes.

    All ranks pass tensors of the same shapes and dtypes in the same order, to form the same buckets. Sums are
    views of the reduced bucket.
    A tensor leaves the list as its bucket is sent: where nobody else holds it, one bucket is in memory twice,
    and no more.
    Cost: each rank sends 2(n-1)/n of the bytes over each axis, one collective per bucket of at most
        `bucket_bytes` (a larger tensor is a bucket by itself).
    """
    for positions in [*_buckets(tensors, bucket_bytes)]:
        members = [tensors[i] for i in positions]
        total = flatten_dense_tensors(members)
        if len(members) == 1:  # its own memory
            total = total.clone()
        for axis, group in groups:
            total = functional.start_sum(total, group, axis=axis, reason=reason)()
        pieces = unflatten_dense_tensors(total, members)
        for i in positions:
            tensors[i] = total
        del members
        yield positions, pieces


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Positions of the tensors of each bucket: dtypes by first appearance, tensors in the order given."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    for positions in by_dtype.values():
        yield from _fill([(i, tensors[i].nbytes) for i in positions], bucket_bytes)


def _fill(sized: Sequence[tuple[int, int]], bucket_bytes: int) -> Iterator[list[int]]:
    bucket: list[int] = []
    filled = 0
    for position, size in sized:
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(position)
        filled += size
    if bucket:
        yield bucket
