"""Means, rewritten on the logical call as a sum over the logical count; moments likewise where dims are cut.

A mean of means is wrong on uneven parts, and not a number on an empty one; the logical count is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from shardwright.rules.algorithms.algorithm import over_rows, register_algorithm
from shardwright.rules.algorithms.ops import finish
from shardwright.rules.described import dims_of
from shardwright.rules.registry import rewrite

_LOW_PRECISION = {torch.float16, torch.bfloat16}


@rewrite("aten::mean.default")
def mean_of_all(_op: object, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean of all elements."""
    return _mean(x, tuple(range(x.dim())), keepdim=False, dtype=dtype)


@rewrite("aten::mean.dim")
def mean(
    _op: object,
    x: Tensor,
    dim: int | Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The mean over some dims."""
    return _mean(x, dims_of(_hashable(dim), x.dim()), keepdim=keepdim, dtype=dtype)


def _mean(x: Tensor, dims: tuple[int, ...], *, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype or x.dtype
    if not (wanted.is_floating_point or wanted.is_complex):
        raise RuntimeError(f"mean(): the input dtype must be floating point or complex, got {wanted}")
    inner = torch.float32 if wanted in _LOW_PRECISION else wanted
    total = torch.sum(x, dims, keepdim=keepdim, dtype=inner) if dims else x.to(inner)
    return (total / _count(x, dims)).to(wanted)


def _count(x: Tensor, dims: Sequence[int]) -> int | float:
    # 0 / 0 is the nan that torch gives for the mean of nothing.
    return prod(x.shape[dim] for dim in dims)


def _hashable(dim: int | Sequence[int] | None) -> object:
    return tuple(dim) if isinstance(dim, Sequence) else dim


def _moments(
    x: Tensor, dim: int | Sequence[int] | None, correction: float | None, *, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """Variance and mean over some dims, in two passes."""
    dims = dims_of(_hashable(dim), x.dim())
    low = x.dtype in _LOW_PRECISION
    values = x.to(torch.float32) if low else x
    center = finish(_mean(values, dims, keepdim=True, dtype=None), "a variance over a cut dim")
    spread = (values - center).abs() if x.is_complex() else values - center
    squares = torch.sum(spread * spread, dims, keepdim=keepdim) if dims else spread * spread
    free = max(0.0, _count(x, dims) - (1.0 if correction is None else float(correction)))
    average = center if keepdim or not dims else center.squeeze(dims)
    variance = finish(squares, "a variance over a cut dim") / free
    return (variance.to(x.dtype), average.to(x.dtype)) if low else (variance, average)


@register_algorithm("aten::var.correction", cost=over_rows("self"))
def var(
    _op: object,
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """var: the mean and the squares of each row are reduced."""
    return _moments(x, dim, correction, keepdim=keepdim)[0]


@register_algorithm("aten::std.correction", cost=over_rows("self"))
def std(
    _op: object,
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    """std: the mean and the squares of each row are reduced."""
    return _moments(x, dim, correction, keepdim=keepdim)[0].sqrt()


@register_algorithm("aten::var_mean.correction", cost=over_rows("self"))
def var_mean(
    _op: object,
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """var_mean: the mean and the squares of each row are reduced."""
    return _moments(x, dim, correction, keepdim=keepdim)


@register_algorithm("aten::std_mean.correction", cost=over_rows("self"))
def std_mean(
    _op: object,
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """std_mean: the mean and the squares of each row are reduced."""
    variance, average = _moments(x, dim, correction, keepdim=keepdim)
    return variance.sqrt(), average


@rewrite("aten::allclose.default")
def allclose(
    _op: object, x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """Whether every pair of elements is close: each rank compares its own, then all agree."""
    return bool(torch.isclose(x, y, rtol=rtol, atol=atol, equal_nan=equal_nan).all())
