"""Strides of logical and local tensors."""

from __future__ import annotations

from shardwright.index.region import Shape


def contiguous_stride(shape: Shape) -> Shape:
    """Row-major strides, as torch gives them: a dim of size 0 counts as 1."""
    stride, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        stride[dim] = step
        step *= shape[dim] or 1
    return tuple(stride)


def stride_like(shape: Shape, stride: Shape) -> Shape:
    """Dense strides of `shape` whose dims are stored in the order of `stride` (equal strides: as given).

    A dim of stride 0 says nothing about its place, and stays where it is, as in a copy that torch makes.
    """
    if len(shape) != len(stride):
        return contiguous_stride(shape)
    if 0 in stride:
        inner_first = _around_expanded(shape, stride)
    else:
        from_behind = range(len(shape) - 1, -1, -1)  # sorting is stable: of equal strides, the last dim first
        inner_first = sorted(from_behind, key=stride.__getitem__)
    out, step = [0] * len(shape), 1
    for dim in inner_first:
        out[dim] = step
        step *= max(shape[dim], 1)
    return tuple(out)


def _around_expanded(shape: Shape, stride: Shape) -> list[int]:
    """The dims, the innermost first, where some have stride 0: in the order of torch's TensorIterator.

    So do `clone` and `empty_like` order them: a dim changes places with each further in that has a larger
    stride, or the same and more elements, and what has stride 0 between them stays.
    """
    dims = list(reversed(range(len(stride))))
    for first in range(1, len(dims)):
        at = first
        for inner in reversed(range(first)):
            one, other = dims[inner], dims[at]
            if not (stride[one] and stride[other]):
                continue
            if stride[one] < stride[other]:
                break
            if stride[one] == stride[other] and shape[one] <= shape[other]:
                continue
            dims[inner], dims[at] = dims[at], dims[inner]
            at = inner
    return dims


def stride_order(shape: Shape, stride: Shape) -> tuple[int, ...] | None:
    """The dims from the outermost to the innermost if the strides are dense in some order, else None."""
    rows = tuple(range(len(shape)))
    if stride == contiguous_stride(shape):
        return rows
    order = tuple(sorted(rows, key=lambda dim: (-stride[dim], dim)))
    return order if stride == ordered_stride(shape, order) else None


def ordered_stride(shape: Shape, order: tuple[int, ...]) -> Shape:
    """Dense strides of a tensor whose dims are stored in this order, the outermost first."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= shape[dim] or 1
    return tuple(stride)
