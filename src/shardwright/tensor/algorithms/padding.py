"""Padding along a cut dim: what is added is known everywhere, so it is joined with what each rank has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwright.index.view import sliced
from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import cutting_axes, register_algorithm
from shardwright.rules.call import Call
from shardwright.views.end_to_end import end_to_end
from shardwright.views.through import through

Amounts = Sequence[int]


def _padded_dims(pad: Amounts, ndim: int) -> Iterator[tuple[int, int, int]]:
    """Each padded dim, and how much is added before it and after; less than 0: taken away."""
    for at in range(0, len(pad), 2):
        if pad[at] or pad[at + 1]:
            yield ndim - 1 - at // 2, pad[at], pad[at + 1]


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    """Nothing, where the result has a layout that leaves every element where it is."""
    layout, pad = layouts[0], tuple(call.arg("pad"))
    dims = list(_padded_dims(pad, len(layout.shape)))
    if layout.pending_axes or 0 in layout.shape or not cutting_axes(layout, [dim for dim, *_ in dims]):
        return None
    for dim, before, after in dims:
        length = layout.shape[dim] + min(before, 0) + min(after, 0)
        if length < 1:
            return None
        inner = through(layout, sliced(layout.shape, dim, -min(before, 0), 1, length), layout.dtype, None)
        parts = [_whole(inner, dim, before), inner, _whole(inner, dim, after)]
        joined = end_to_end(tuple(part for part in parts if part.shape[dim]), dim)
        if joined is None:
            return None
        layout = joined
    return 0


def _whole(like: Layout, dim: int, length: int) -> Layout:
    shape = tuple(max(length, 0) if at == dim else size for at, size in enumerate(like.shape))
    return like.replicated().with_shape(shape)


def _filled(like: torch.Tensor, dim: int, length: int, value: Any) -> torch.Tensor:
    return like.new_full((*like.shape[:dim], max(length, 0), *like.shape[dim + 1 :]), value)


@register_algorithm("aten::constant_pad_nd", cost=_cost)
def pad(_op: object, x: torch.Tensor, pad: Amounts, value: Any = 0) -> torch.Tensor:
    """padding: joined with what is added."""
    for dim, before, after in _padded_dims(pad, x.dim()):
        inner = x.narrow(dim, -min(before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
        parts = [_filled(x, dim, before, value), inner, _filled(x, dim, after, value)]
        x = torch.cat([part for part in parts if part.shape[dim]], dim)
    return x
