"""The first k of a cut dim: each rank's own first k, then the first k of these.

k entries per row and rank are gathered, values with their logical indices. Ties go to the smaller index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import layout_of, pending_bytes, register_algorithm
from shardwright.rules.call import Call
from shardwright.tensor.algorithms.cut_dim import (
    CutDim,
    find_cut,
    gather_along,
    gather_bytes,
    is_outside,
    whole_along,
)
from shardwright.tensor.dtensor import DTensor

_WHY = "the first of a cut dim"


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    layout = layout_of(call, layouts, "self")
    if layout is None or not layout.shape:
        return None
    cut = find_cut(layout, call.arg("dim"))
    if cut is None:
        return None
    each = min(call.arg("k"), max(held.length for held in cut.held))
    sent = gather_bytes(layout, call.arg("dim"), each, layout.itemsize + 8)
    return None if sent is None else sent + pending_bytes(layouts)


@register_algorithm("aten::topk", cost=_cost)
def topk(
    _op: object,
    x: DTensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002, ARG001  the op's own name; in order is in some order too
) -> tuple[Any, Any]:
    """topk: k entries of each row are gathered from each rank."""
    return _first(x, k, dim, largest=largest)


@register_algorithm("aten::kthvalue", cost=_cost)
def kthvalue(_op: object, x: DTensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """kthvalue: k entries of each row are gathered from each rank."""
    values, places = (t.narrow(dim, k - 1, 1) for t in _first(x, k, dim, largest=False))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _first(x: DTensor, k: int, dim: int, *, largest: bool) -> tuple[DTensor, DTensor]:
    cut = find_cut(x._spec.layout, dim)
    assert cut is not None  # noqa: S101  the cost said so
    if is_outside(x):
        nothing = x._local_tensor
        return whole_along(x, cut, nothing, k), whole_along(x, cut, nothing.to(torch.int64), k)
    values, places = _candidates(x, cut, k, largest=largest)
    # By place first, so that a stable order of the values puts the smaller place first on ties.
    places, by_place = torch.sort(places, dim=cut.dim)
    values = values.gather(cut.dim, by_place)
    values, order = torch.sort(values, dim=cut.dim, descending=largest, stable=True)
    chosen = places.gather(cut.dim, order).narrow(cut.dim, 0, k)
    values = values.narrow(cut.dim, 0, k)
    return whole_along(x, cut, values.contiguous(), k), whole_along(x, cut, chosen.contiguous(), k)


def _candidates(x: DTensor, cut: CutDim, k: int, *, largest: bool) -> tuple[Tensor, Tensor]:
    """Each rank's first k (or all that it has), with their logical indices, on every rank."""
    local, coords = x._local_tensor, x._spec.coords
    held = cut.held[cut.own(x._spec.layout, coords or ())]
    counts = [min(k, other.length) for other in cut.held]
    values, at = local.topk(min(k, held.length), cut.dim, largest)
    places = held.positions(local.device)[at]
    longest = max(counts)
    every = [gather_along(x, cut, _padded(t, cut.dim, longest), _WHY) for t in (values, places)]
    real = [b * longest + j for b, count in enumerate(counts) for j in range(count)]
    slots = torch.tensor(real, dtype=torch.int64, device=local.device)  # there may be none
    return every[0].index_select(cut.dim, slots), every[1].index_select(cut.dim, slots)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x
    shape = list(x.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
