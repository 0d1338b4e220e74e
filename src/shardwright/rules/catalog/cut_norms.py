"""Normalisations, variances and norms over a cut dim: a few sums per row, reduced and finished.

Each algorithm is the textbook formula in two passes (first the mean, then what is left of it), in float32
for half types, as the kernels compute. Counts are logical, so parts may be uneven or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

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
from shardwright.rules.algorithms.ops import finish, indices, wide
from shardwright.rules.call import Call
from shardwright.rules.described import dims_of

# ------------------------------------------------------------------------------------------ layer norm


_over_normalized = over_rows("input", lambda call: range(-len(call.arg("normalized_shape")), 0))


def _last(x: Tensor, count: int) -> tuple[int, ...]:
    return tuple(range(x.dim() - count, x.dim()))


def _mean(x: Tensor, dims: tuple[int, ...], count: int, why: str) -> Tensor:
    """The mean over dims, kept, finished."""
    return finish(x.sum(dims, keepdim=True), why) / count


@register_algorithm("aten::native_layer_norm", cost=_over_normalized)
def layer_norm(
    _op: object, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm: the mean and the variance of each row are reduced."""
    why = "layer_norm over a cut dim"
    dims, count = _last(x, len(shape)), prod(shape)
    mean = _mean(wide(x), dims, count, why)
    centered = wide(x) - mean
    rstd = (_mean(centered * centered, dims, count, why) + eps).rsqrt()
    out = centered * rstd
    if weight is not None:
        out = out * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    return out, mean, rstd


@register_algorithm("aten::native_layer_norm_backward", cost=_over_normalized)
def layer_norm_backward(
    _op: object,
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """layer_norm's backward: two sums of each row are reduced."""
    why = "layer_norm over a cut dim"
    dims, count = _last(x, len(shape)), prod(shape)
    rows = tuple(range(x.dim() - len(shape)))
    grad, scale = wide(grad_out), wide(rstd)
    normed = (wide(x) - wide(mean)) * scale
    of_x = None
    if output_mask[0]:
        inner = grad if weight is None else grad * wide(weight)
        shift, slope = _mean(inner, dims, count, why), _mean(inner * normed, dims, count, why)
        of_x = (inner - shift - normed * slope) * scale
    of_weight = _summed(grad * normed, rows) if output_mask[1] and weight is not None else None
    of_bias = _summed(grad, rows) if output_mask[2] and bias is not None else None
    return of_x, of_weight, of_bias


def _summed(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sum(dims) if dims else x


# ------------------------------------------------------------------------------------------ group norm


def _groups(call: Call, layouts: Sequence[Layout]) -> int | None:
    """Two reductions of one number per group and image, where channels or space are cut."""
    layout = layout_of(call, layouts, "input")
    if layout is None:
        return None
    dims = tuple(range(1, len(layout.shape)))
    sent = row_bytes(layout, dims, max(4, layout.itemsize), each=call.arg("group"))
    return None if sent is None else 2 * sent + pending_bytes(layouts)


class _Groups:
    """Means over the groups of channels of `[n, c, space...]`, and back to the channels."""

    def __init__(self, x: Tensor, channels: int, groups: int, space: int) -> None:
        self.of_channel = indices(x, 1) // (channels // groups)
        self.groups, self.count = groups, channels // groups * space
        self.ones = [1] * (x.dim() - 2)

    def mean(self, x: Tensor) -> Tensor:
        """[n, c, space...] -> [n, groups], finished."""
        per_channel = x.sum(tuple(range(2, x.dim()))) if x.dim() > 2 else x
        zeros = x.new_zeros((x.shape[0], self.groups))
        total = zeros.index_add(1, self.of_channel, per_channel)
        return finish(total, "group_norm over a cut dim") / self.count

    def spread(self, x: Tensor) -> Tensor:
        """[n, groups] -> [n, c, 1...]."""
        found = x.index_select(1, self.of_channel)
        return found.view([*found.shape, *self.ones])

    def channel(self, x: Tensor) -> Tensor:
        """[c] -> [c, 1...]."""
        return x.view([*x.shape, *self.ones])


@register_algorithm("aten::native_group_norm", cost=_groups)
def group_norm(
    _op: object,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,  # noqa: ARG001  the logical call knows it from x
    channels: int,
    space: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """group_norm: the mean and the variance of each group are reduced."""
    of = _Groups(x, channels, groups, space)
    mean = of.mean(wide(x))
    centered = wide(x) - of.spread(mean)
    rstd = (of.mean(centered * centered) + eps).rsqrt()
    out = centered * of.spread(rstd)
    if weight is not None:
        out = out * of.channel(wide(weight))
    if bias is not None:
        out = out + of.channel(wide(bias))
    return out, mean, rstd


@register_algorithm("aten::native_group_norm_backward", cost=_groups)
def group_norm_backward(
    _op: object,
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,  # noqa: ARG001  the logical call knows it from x
    channels: int,
    space: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """group_norm's backward: two sums of each group are reduced."""
    of = _Groups(x, channels, groups, space)
    grad, scale = wide(grad_out), of.spread(wide(rstd))
    normed = (wide(x) - of.spread(wide(mean))) * scale
    of_x = None
    if output_mask[0]:
        inner = grad if weight is None else grad * of.channel(wide(weight))
        shift, slope = of.spread(of.mean(inner)), of.spread(of.mean(inner * normed))
        of_x = (inner - shift - normed * slope) * scale
    rows = (0, *range(2, x.dim()))
    of_weight = (grad * normed).sum(rows) if output_mask[1] else None
    return of_x, of_weight, grad.sum(rows) if output_mask[2] else None


# --------------------------------------------------------------------------------------- vector norms


@register_algorithm("aten::linalg_vector_norm", cost=over_rows("self", reductions=1))
def vector_norm(
    _op: object,
    x: Tensor,
    ord: float = 2,  # noqa: A002  the op's own name
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """vector_norm: the sum of powers of each row is reduced, or its extreme, or a count."""
    values = wide(x if dtype is None else x.to(dtype)).abs()
    dims = dims_of(dim, x.dim())
    why = "vector_norm over a cut dim"
    if ord in {inf, -inf}:
        return finish((values.amax if ord > 0 else values.amin)(dims, keepdim=keepdim), why)
    if ord == 0:
        return finish((values != 0).to(values.dtype).sum(dims, keepdim=keepdim), why)
    return finish(values.pow(ord).sum(dims, keepdim=keepdim), why).pow(1.0 / ord)
