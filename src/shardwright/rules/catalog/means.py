"""Means as sums over the logical count; moments likewise where dims are cut.

A mean of means is wrong on uneven parts, and not a number on an empty one; the logical count is always right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.layout.dtypes import HALF
from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import over_rows, register_algorithm
from shardwright.rules.algorithms.ops import finish
from shardwright.rules.call import Call
from shardwright.rules.described import dims_of
from shardwright.rules.formula import Formula, formula
from shardwright.rules.held_label import Held
from shardwright.rules.registry import rewrite
from shardwright.rules.rule import register_rule


@register_rule("aten::mean", any_size=True)
def mean(call: Call) -> Formula:
    """Where a reduced dim is cut: the sum of what is held, divided by the logical count.

    In low precision such dims are whole, or the algorithm runs: what is divided is a sum in float32.
    """
    rank = len(call.operands[0].shape)
    over = dims_of(call.bound.get("dim"), rank)
    (made,) = call.results
    dtype = None if made is None else made.dtype
    low = dtype in HALF
    operand = [f"r{dim}{'!' * low}" if dim in over else f"d{dim}" for dim in range(rank)]
    left = [
        "1" if dim in over else f"d{dim}"
        for dim in range(rank)
        if call.bound.get("keepdim") or dim not in over
    ]
    text = f"{' '.join(operand) or '()'} -> {' '.join(left) or '()'}"
    if low:
        return formula(text)
    facts = "self: sum->sum" if call.operands[0].dtype == dtype else ()
    return formula(text, reduce="sum", hom=facts, local=_share, held=tuple(f"r{dim}" for dim in over))


def _share(
    _op: object,
    held: Mapping[str, Held],
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What a rank contributes to a mean. 0 / 0 is the nan that torch gives for the mean of nothing."""
    total = torch.sum(x, dims_of(dim, x.dim()), keepdim=keepdim, dtype=dtype, out=out)
    count = prod(label.size for label in held.values())
    return total / count if out is None else total.div_(count)


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    """One number per row in float32, finished."""
    return over_rows("self", "dim" if "dim" in call.bound else None, reductions=1, itemsize=4)(call, layouts)


@register_algorithm("aten::mean", cost=_cost)
def mean_in_float32(
    _op: object,
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """mean: the sum of each row is reduced."""
    return _mean(x, dims_of(dim, x.dim()), keepdim=keepdim, dtype=dtype)


def _mean(x: Tensor, dims: tuple[int, ...], *, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype or x.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        raise RuntimeError(f"mean(): the input dtype must be floating point or complex, got {wanted}")
    inner = torch.float32 if wanted in HALF else wanted
    total = torch.sum(x, dims, keepdim=keepdim, dtype=inner) if dims else x.to(inner)
    return (total / _count(x, dims)).to(wanted)


def _count(x: Tensor, dims: Sequence[int]) -> int | float:
    # 0 / 0 is the nan that torch gives for the mean of nothing.
    return prod(x.shape[dim] for dim in dims)


def _moments(
    x: Tensor, dim: int | Sequence[int] | None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean over some dims, in two passes."""
    dims = dims_of(dim, x.dim())
    low = x.dtype in HALF
    values = x.to(torch.float32) if low else x
    center = finish(_mean(values, dims, keepdim=True, dtype=None), "a variance over a cut dim")
    spread = (values - center).abs() if x.is_complex() else values - center
    squares = torch.sum(spread * spread, dims, keepdim=keepdim) if dims else spread * spread
    free = max(0.0, _count(x, dims) - (1.0 if correction is None else float(correction)))
    average = center if keepdim or not dims else center.squeeze(dims)
    variance = finish(squares, "a variance over a cut dim") / free
    return (variance.to(x.dtype), average.to(x.dtype)) if low else (variance, average)


@register_algorithm("aten::var.correction", cost=over_rows("self"))
def var(_op: object, x: Tensor, dim: Sequence[int] | None = None, **how: Any) -> Tensor:
    """var: the mean and the squares of each row are reduced."""
    return _moments(x, dim, **how)[0]


@register_algorithm("aten::std.correction", cost=over_rows("self"))
def std(_op: object, x: Tensor, dim: Sequence[int] | None = None, **how: Any) -> Tensor:
    """std: the mean and the squares of each row are reduced."""
    return _moments(x, dim, **how)[0].sqrt()


@register_algorithm("aten::var_mean.correction", cost=over_rows("self"))
def var_mean(_op: object, x: Tensor, dim: Sequence[int] | None = None, **how: Any) -> tuple[Tensor, Tensor]:
    """var_mean: the mean and the squares of each row are reduced."""
    return _moments(x, dim, **how)


@register_algorithm("aten::std_mean.correction", cost=over_rows("self"))
def std_mean(_op: object, x: Tensor, dim: Sequence[int] | None = None, **how: Any) -> tuple[Tensor, Tensor]:
    """std_mean: the mean and the squares of each row are reduced."""
    variance, average = _moments(x, dim, **how)
    return variance.sqrt(), average


@rewrite("aten::allclose.default")
def allclose(
    _op: object, x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Whether every pair of elements is close: each rank compares its own, then all agree."""
    return bool(torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan).all())
