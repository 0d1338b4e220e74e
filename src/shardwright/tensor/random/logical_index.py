"""The logical row-major index of each element that a rank holds, from the regions alone: O(what it holds)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.index.region import Box, Region
from shardwright.index.runs import Runs
from shardwright.index.stride import contiguous_stride
from shardwright.layout.layout import Layout


def interval_of(layout: Layout, coords: tuple[int, ...]) -> tuple[int, int] | None:
    """`(start, count)` if the rank holds one interval of the flattened tensor in order, else None."""
    region = layout.region(coords)
    if not region.numel:
        return 0, 0
    box = region.bounding_box
    if box is None:
        return None
    wide = [d for d, size in enumerate(box.size) if size != 1]
    first = wide[0] if wide else len(box.size)
    if any(box.size[d] != layout.shape[d] for d in range(first + 1, len(box.size))):
        return None
    strides = contiguous_stride(layout.shape)
    return sum(o * s for o, s in zip(box.offset, strides, strict=True)), region.numel


def indices_of(layout: Layout, coords: tuple[int, ...], device: torch.device) -> Tensor:
    """The index of every element in local row-major order:  [elements of the rank], int64."""
    region: Region = layout.region(coords)
    strides = contiguous_stride(layout.shape)
    if region.runs is not None:
        return _summed([_of_runs(runs, device) for runs in region.runs], strides, device)
    found = [_of_box(box, strides, device) for box in region.boxes]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def _of_box(box: Box, strides: Sequence[int], device: torch.device) -> Tensor:
    pairs = zip(box.offset, box.size, strict=True)
    return _summed([torch.arange(o, o + size, device=device) for o, size in pairs], strides, device)


def _of_runs(runs: Runs, device: torch.device) -> Tensor:
    found = [
        torch.arange(run.repeat, device=device)[:, None] * run.stride
        + torch.arange(run.offset, run.offset + run.size, device=device)
        for run in runs
    ]
    if not found:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([part.reshape(-1) for part in found])


def _summed(per_dim: Sequence[Tensor], strides: Sequence[int], device: torch.device) -> Tensor:
    """Indices of a product of index lists, row-major."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for index, stride in zip(per_dim, strides, strict=True):
        total = total[..., None] + index * stride
    return total.reshape(-1)
