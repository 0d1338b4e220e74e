"""Moves of rows whose gradients are moves of rows: no scatter-add, so the same bits on every run.

A (token, slot) pair is one of the `top_k` copies of a token that go to an expert; pairs are numbered
token * top_k + slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PairOrder(NamedTuple):
    """Pairs sorted by expert, ties by number: `order[i]` is the i-th pair; `inverse[p]` where pair p went."""

    order: Tensor
    inverse: Tensor


def sort_by_group(groups: Tensor) -> PairOrder:
    """Return the stable order of elements by group number:  int64 [P] -> [P] twice."""
    order = groups.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return PairOrder(order, inverse)


def count_groups(groups: Tensor, num_groups: int) -> Tensor:
    """Return how many elements each group has:  int64 [P] -> int64 [num_groups]."""
    counts = torch.zeros(num_groups, dtype=torch.int64, device=groups.device)
    return counts.scatter_add_(0, groups, torch.ones_like(groups))


def spread_tokens(tokens: Tensor, pairs: PairOrder, top_k: int) -> Tensor:
    """Return one row per pair, in sorted order:  [T, d] -> [T * top_k, d].

    The gradient of a token is the sum of its copies', slot after slot.
    """
    return _spread(tokens, pairs.order, pairs.inverse, top_k)


def permute_rows(rows: Tensor, pairs: PairOrder) -> Tensor:
    """Return the rows in sorted order:  [P, d] -> [P, d]."""
    return _permute(rows, pairs.order, pairs.inverse)


def unpermute_rows(rows: Tensor, pairs: PairOrder) -> Tensor:
    """Return sorted rows in the order before sorting:  [P, d] -> [P, d]."""
    return _permute(rows, pairs.inverse, pairs.order)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        return _permute(gradient, inverse, order), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.top_k = top_k
        return tokens.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        order, inverse = ctx.saved_tensors
        copies = _permute(gradient, inverse, order)
        return copies.unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


# torch does not annotate `apply`; these names are where its results become known to the type checker.
_permute: Callable[..., Tensor] = _Permute.apply
_spread: Callable[..., Tensor] = _Spread.apply
