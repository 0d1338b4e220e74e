"""Scans along a cut dim: each contiguous piece on its own, then what comes before it, from their totals.

One total per row and piece is gathered. Pieces may lie on the ranks in any order: a prefix is that of the
logical order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.layout.dtypes import HALF
from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import Cost, layout_of, pending_bytes, register_algorithm
from shardwright.rules.call import Call
from shardwright.tensor.algorithms.cut_dim import (
    CutDim,
    find_cut,
    gather_along,
    gather_bytes,
    is_outside,
    like_cut,
)
from shardwright.tensor.dtensor import DTensor

State = tuple[Tensor, ...]
_MANY = 256
_WHY = "a scan along a cut dim"


@dataclass(frozen=True, slots=True)
class Scan:
    """A scan of one piece, and how a piece goes on after what came before it.

    Args:
        along: `(piece, dim, start)`: the scan of a piece whose first logical index is `start`.
        after: `(before, state)`: the scan of a piece when this came before it.
    """

    along: Callable[[Tensor, int, int], State]
    after: Callable[[State, State], State]


def _cost(extra: int) -> Cost:
    def cost(call: Call, layouts: Sequence[Layout]) -> int | None:
        layout = layout_of(call, layouts, "self")
        if layout is None or not layout.shape or layout.dtype.is_complex:
            return None
        cut = find_cut(layout, call.arg("dim"))
        if cut is None:
            return None
        longest = max(len(held.pieces) for held in cut.held)
        made = call.results[0]
        itemsize = max(4, layout.itemsize if made is None else made.dtype.itemsize)
        sent = gather_bytes(layout, call.arg("dim"), longest, itemsize + extra)
        return None if sent is None or longest * len(cut.held) > _MANY else sent + pending_bytes(layouts)

    return cost


def run_scan(x: DTensor, dim: int, scan: Scan, dtypes: Sequence[torch.dtype]) -> tuple[DTensor, ...]:
    """The scan of a DTensor along a dim that is cut; the results are cut as x is."""
    cut = find_cut(x._spec.layout, dim)
    assert cut is not None  # noqa: S101  the cost said so
    local = x._local_tensor
    if is_outside(x):
        return tuple(like_cut(x, local.to(dtype)) for dtype in dtypes)
    own = cut.own(x._spec.layout, x._spec.coords or ())
    pieces = cut.held[own].pieces
    parts = local.split([length for _, length in pieces], cut.dim) if pieces else ()
    states = [scan.along(part, cut.dim, start) for part, (start, _) in zip(parts, pieces, strict=True)]
    before = _before(x, cut, own, states, scan, dtypes)
    done = [s if b is None else scan.after(b, s) for b, s in zip(before, states, strict=True)]
    results = []
    for index, dtype in enumerate(dtypes):
        found = [state[index] for state in done]
        results.append(torch.cat(found, cut.dim) if found else local.to(dtype))
    return tuple(like_cut(x, result) for result in results)


def _before(
    x: DTensor, cut: CutDim, own: int, states: list[State], scan: Scan, dtypes: Sequence[torch.dtype]
) -> list[State | None]:
    """What comes before each piece of this rank, in logical order."""
    longest = max(len(held.pieces) for held in cut.held)
    tables = [_gathered(x, cut, [s[i] for s in states], longest, dtype) for i, dtype in enumerate(dtypes)]
    slots = [(piece[0], b, j) for b, held in enumerate(cut.held) for j, piece in enumerate(held.pieces)]
    found: dict[tuple[int, int], State | None] = {}
    running: State | None = None
    for _, b, j in sorted(slots):
        found[b, j] = running
        total = tuple(table.narrow(cut.dim, b * longest + j, 1) for table in tables)
        running = total if running is None else scan.after(running, total)
    return [found[own, j] for j in range(len(states))]


def _gathered(x: DTensor, cut: CutDim, states: list[Tensor], longest: int, dtype: torch.dtype) -> Tensor:
    """The last entry of every piece of every rank."""
    last = [state.narrow(cut.dim, state.shape[cut.dim] - 1, 1) for state in states]
    shape = list(x._local_tensor.shape)
    shape[cut.dim] = longest - len(last)
    last.append(x._local_tensor.new_zeros(shape, dtype=dtype))
    return gather_along(x, cut, torch.cat(last, cut.dim), _WHY)


def _reducing(op: Callable[..., Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Scan:
    return Scan(
        along=lambda piece, dim, _start: (op(piece, dim),),
        after=lambda before, state: (join(before[0], state[0]),),
    )


_SUM = _reducing(torch.cumsum, torch.add)
_PRODUCT = _reducing(torch.cumprod, torch.mul)
_LOG_SUM = _reducing(torch.logcumsumexp, torch.logaddexp)


def _accumulated(x: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype]:
    """The values in the type that they are added up in, and that type."""
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    inner = torch.float32 if wanted in HALF else wanted
    return x.to(inner), inner


@register_algorithm("aten::cumsum", cost=_cost(0))
def cumsum(_op: object, x: DTensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """cumsum: the sums of the pieces are gathered."""
    values, inner = _accumulated(x, dtype)
    return run_scan(values, dim, _SUM, [inner])[0]


@register_algorithm("aten::cumprod", cost=_cost(0))
def cumprod(_op: object, x: DTensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """cumprod: the products of the pieces are gathered."""
    values, inner = _accumulated(x, dtype)
    return run_scan(values, dim, _PRODUCT, [inner])[0]


@register_algorithm("aten::logcumsumexp", cost=_cost(0))
def logcumsumexp(_op: object, x: DTensor, dim: int) -> Any:
    """logcumsumexp: the sums of the pieces are gathered."""
    values, inner = _accumulated(x, None)
    return run_scan(values, dim, _LOG_SUM, [inner])[0]


def _extreme(op: Callable[..., Any], beats: Callable[[Tensor, Tensor], Tensor]) -> Scan:
    """The later of equal values wins, and nan beats everything, as in the kernels."""

    def along(piece: Tensor, dim: int, start: int) -> State:
        values, places = op(piece, dim)
        return values, places + start

    def after(before: State, state: State) -> State:
        later = beats(state[0], before[0])
        if state[0].is_floating_point():
            later = later | state[0].isnan()
        return torch.where(later, state[0], before[0]), torch.where(later, state[1], before[1])

    return Scan(along, after)


_MAXIMUM = _extreme(torch.cummax, torch.ge)
_MINIMUM = _extreme(torch.cummin, torch.le)


@register_algorithm("aten::cummax", cost=_cost(8))
def cummax(_op: object, x: DTensor, dim: int) -> tuple[Any, ...]:
    """cummax: the extremes of the pieces and their places are gathered."""
    return run_scan(x, dim, _MAXIMUM, [x.dtype, torch.int64])


@register_algorithm("aten::cummin", cost=_cost(8))
def cummin(_op: object, x: DTensor, dim: int) -> tuple[Any, ...]:
    """cummin: the extremes of the pieces and their places are gathered."""
    return run_scan(x, dim, _MINIMUM, [x.dtype, torch.int64])
