"""What follows from the regions alone: taking a local tensor, joining locals, the dims that are cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shardwright.errors import PlacementError
from shardwright.index.region import Box, Region, Shape
from shardwright.index.runs import Runs, intervals
from shardwright.index.stride import stride_like
from shardwright.remember import remembered


class HasRegion(Protocol):
    """Anything that says what a coord holds."""

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """What `coord` of `n` holds."""


def take_region(x: Tensor, region: Region) -> Tensor:
    """The local tensor of a region of `x`; a view where the region is one box. Differentiable."""
    if not region.numel:
        return x[(slice(0, 0),) * x.dim() or None].reshape(-1)[:0].reshape(region.local_shape)
    if region.runs is not None:
        return _take_runs(x, region.runs)
    pieces = [x[box.slices].reshape(-1) for box in region.boxes]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return flat.reshape(region.local_shape)


def _take_runs(x: Tensor, runs: tuple[Runs, ...]) -> Tensor:
    for dim, of_dim in enumerate(runs):
        x = _take_dim(x, dim, of_dim)
    return x


def _take_dim(x: Tensor, dim: int, runs: Runs) -> Tensor:
    pieces = [x.narrow(dim, offset, size) for offset, size in intervals(runs)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def laid_like(made: Tensor, given: Tensor) -> Tensor:
    """What was made of a tensor, in memory in the order of that: kernels trust the strides of the whole."""
    said, has = (stride_like(tuple(made.shape), x.stride()) for x in (given, made))
    if said == has or made.dim() != given.dim():
        return made
    order = sorted(range(made.dim()), key=lambda dim: -said[dim])
    return made.permute(order).contiguous().permute([order.index(dim) for dim in range(made.dim())])


def join_regions(parts: Sequence[Tensor], regions: Sequence[Region], shape: Shape) -> Tensor:
    """The tensor of this shape made of each part at its region, which must cover it.

    Raises: PlacementError: a part has not the shape of its region.
    """
    out = parts[0].new_empty(shape)
    for part, region in zip(parts, regions, strict=True):
        if tuple(part.shape) != region.local_shape:
            raise PlacementError(f"a local tensor has shape {tuple(part.shape)}, not {region.local_shape}")
        put_region(out, region, part)
    return out


def put_region(out: Tensor, region: Region, part: Tensor) -> None:
    """Write a local tensor to its region of `out`, in place. Differentiable."""
    if region.runs is not None and region.numel:
        _put_runs(out, region.runs, part, 0)
        return
    flat = part.reshape(-1)
    start = 0
    for box in region.boxes:
        out[box.slices] = flat[start : start + box.numel].reshape(box.size)
        start += box.numel


def _put_runs(out: Tensor, runs: tuple[Runs, ...], part: Tensor, dim: int) -> None:
    while dim < len(runs) and part.shape[dim] == out.shape[dim]:
        if len(runs[dim]) != 1 or runs[dim][0].offset or runs[dim][0].repeat != 1:  # no prefix
            break
        dim += 1
    if dim == len(runs):
        out.copy_(part)
        return
    start = 0
    for offset, size in intervals(runs[dim]):
        _put_runs(out.narrow(dim, offset, size), runs, part.narrow(dim, start, size), dim + 1)
        start += size


@remembered(4096)
def derived_cut_dims(placement: HasRegion, shape: Shape, n: int) -> tuple[int, ...]:
    """The dims on which some coord's local index is not the logical index, or on which others depend.

    Along a dim that is not among them, every coord holds of each index what it holds of the first: a skew,
    which holds other columns of each row, cuts rows and columns. Asks every coord, once.
    """
    whole = set(range(len(shape)))
    for coord in range(n if prod(shape) else 0):
        region = placement.region(shape, n, coord)
        if region.numel:
            whole &= _whole_dims(region, shape)
            whole = {dim for dim in whole if _is_repeated(region, shape, dim)}
    return tuple(dim for dim in range(len(shape)) if dim not in whole)


_FEW = 1 << 16  # elements that are compared one by one


def _is_repeated(region: Region, shape: Shape, dim: int) -> bool:
    """Does the region hold the same of each index of a dim that keeps its index? If in doubt, no."""
    if region.runs is not None or shape[dim] == 1:
        return True
    local, start = region.local_shape, 0
    covered: defaultdict[tuple[Shape, ...], list[tuple[int, int]]] = defaultdict(list)
    for box in region.boxes:
        first = unravel(start, local)
        others = tuple((*x[:dim], *x[dim + 1 :]) for x in (first, box.offset, box.size))
        covered[others].append((box.offset[dim], box.size[dim]))
        start += box.numel
    if all(_tiles(pieces, shape[dim]) for pieces in covered.values()):
        return True
    return region.numel <= _FEW and _is_shifted(region, shape, dim)


def _tiles(pieces: list[tuple[int, int]], length: int) -> bool:
    """Do (offset, size) pairs cover a length, each index once?"""
    end = 0
    for offset, size in sorted(pieces):
        if offset != end:
            return False
        end += size
    return end == length


def _is_shifted(region: Region, shape: Shape, dim: int) -> bool:
    """The same, element by element: boxes may be cut otherwise at each index."""
    local = region.local_shape
    step, apart, length = prod(shape[dim + 1 :]), prod(local[dim + 1 :]), local[dim]
    strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
    held: list[int] = []
    for box in region.boxes:
        sides = (range(o * s, (o + k) * s, s) for o, k, s in zip(box.offset, box.size, strides, strict=True))
        held += map(sum, product(*sides))
    followed = (at for at in range(len(held)) if at // apart % length < length - 1)
    return all(held[at + apart] - held[at] == step for at in followed)


def _whole_dims(region: Region, shape: Shape) -> set[int]:
    local = region.local_shape
    whole = {dim for dim in range(len(shape)) if local[dim] == shape[dim]}
    start = 0
    for box in region.boxes:
        whole &= _aligned_dims(box, start, local)
        start += box.numel
    return whole


def _aligned_dims(box: Box, start: int, local: Shape) -> set[int]:
    """The dims on which the elements of a box, stored from local position `start`, keep their index."""
    first, last = unravel(start, local), unravel(start + box.numel - 1, local)
    fixed = 0
    while fixed < len(local) and first[fixed] == last[fixed] and box.size[fixed] == 1:
        fixed += 1
    tail = len(local)
    while tail > fixed and first[tail - 1] == 0 and box.size[tail - 1] == local[tail - 1]:
        tail -= 1
    if box.numel == prod(local):  # the whole local tensor: leading dims of equal size keep their index
        while fixed < tail and box.size[fixed] == local[fixed]:
            fixed += 1
    single = [dim for dim in range(len(local)) if local[dim] == 1 == box.size[dim]]
    boxed = {*range(fixed), *range(tail, len(local)), *single}
    if tail == fixed + 1 and last[fixed] + 1 - first[fixed] == box.size[fixed]:
        boxed.add(fixed)
    return {dim for dim in boxed if first[dim] == box.offset[dim]}


def unravel(position: int, shape: Shape) -> Shape:
    """The index at a position of the row-major flattening."""
    index = []
    for size in reversed(shape):
        position, digit = divmod(position, size)
        index.append(digit)
    return tuple(reversed(index))


def check_dim(dim: int, ndim: int, name: str) -> int:
    """`dim` counted from the front.

    Raises: PlacementError: the tensor has no such dim.
    """
    if not -ndim <= dim < ndim:
        have = f"dims {-ndim} to {ndim - 1}" if ndim else "no dims"
        raise PlacementError(f"{name}: dim {dim} is out of range, the tensor has {have}")
    return dim % ndim
