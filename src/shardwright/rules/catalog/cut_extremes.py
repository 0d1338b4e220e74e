"""Extremes over a cut dim, with their places: the value of each row is reduced, then the first place of it.

On ties the smallest index wins and nan beats everything, as on one device. Places are logical indices, so
parts in any order will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import (
    layout_of,
    over_rows,
    pending_bytes,
    register_algorithm,
    row_bytes,
)
from shardwright.rules.algorithms.ops import finish, positions
from shardwright.rules.call import Call

_WHY = "an extreme over a cut dim"


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    """A value and an index of each row."""
    layout = layout_of(call, layouts, "self")
    if layout is None:
        return None
    dim, rank = call.arg("dim"), len(layout.shape)
    dims = tuple(range(rank)) if dim is None else (dim % rank,) if rank else ()
    sent = row_bytes(layout, dims, layout.itemsize + 8)
    return None if sent is None else sent + pending_bytes(layouts)


def _first(x: Tensor, top: Tensor, places: Tensor, none: int) -> Tensor:
    """The places where `x` is `top`, a number past all of them elsewhere."""
    found = (x == top) | ((x != x) & (top != top)) if x.is_floating_point() else x == top  # noqa: PLR0124  nan
    return places.masked_fill(~found, none)


def _along(x: Tensor, dim: int, *, largest: bool, keepdim: bool) -> tuple[Tensor, Tensor]:
    dim = dim % x.dim()
    top = finish(x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True), _WHY)
    places = _first(x, top, positions(x, dim).expand(x.shape), x.shape[dim])
    place = finish(places.amin(dim, keepdim=True), _WHY)
    return (top, place) if keepdim else (top.squeeze(dim), place.squeeze(dim))


@register_algorithm("aten::max.dim", cost=_cost)
def max_along(_op: object, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """max: the value and the first place of each row are reduced."""
    return _along(x, dim, largest=True, keepdim=keepdim)


@register_algorithm("aten::min.dim", cost=_cost)
def min_along(_op: object, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """min: the value and the first place of each row are reduced."""
    return _along(x, dim, largest=False, keepdim=keepdim)


def _place(x: Tensor, dim: int | None, *, largest: bool, keepdim: bool) -> Tensor:
    if dim is not None:
        return _along(x, dim, largest=largest, keepdim=keepdim)[1]
    top = finish(x.amax() if largest else x.amin(), _WHY)
    flat = torch.zeros((), dtype=torch.int64, device=x.device)
    places = sum((positions(x, d) * prod(x.shape[d + 1 :]) for d in range(x.dim())), flat)
    place = finish(_first(x, top, places.expand(x.shape), x.numel()).amin(), _WHY)
    return place.view([1] * x.dim()) if keepdim else place


@register_algorithm("aten::argmax", cost=_cost)
def argmax(_op: object, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """argmax: the value and the first place of each row are reduced."""
    return _place(x, dim, largest=True, keepdim=keepdim)


@register_algorithm("aten::argmin", cost=_cost)
def argmin(_op: object, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """argmin: the value and the first place of each row are reduced."""
    return _place(x, dim, largest=False, keepdim=keepdim)


@register_algorithm("aten::aminmax", cost=over_rows("self"))
def aminmax(
    _op: object, x: Tensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """aminmax: both values of each row are reduced."""
    if dim is None:
        low, high = finish(x.amin(), _WHY), finish(x.amax(), _WHY)
        ones = [1] * x.dim()
        return (low.view(ones), high.view(ones)) if keepdim else (low, high)
    return finish(x.amin(dim, keepdim=keepdim), _WHY), finish(x.amax(dim, keepdim=keepdim), _WHY)
