"""The ops that slide windows, and what a rank calls on its own windows in place of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.rules.call import Call
from shardwright.rules.windows import Interval, Sliding, SlidingOp

Given = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank has of one dim: the rows of the result that it makes, and the operand's rows they see.

    Args:
        cut: whether the dim is cut; then the operand stands padded, and the call must not pad it again.
    """

    sliding: Sliding
    rows: Interval
    start: int
    cut: bool


# The results of a local call on windows: `(op, local arguments, pieces of the spatial dims)`.
Kernel = Callable[[torch._ops.OpOverload, Given, Sequence[Piece]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class WindowOp:
    """One op: its windows, the value that stands beyond the edges, its local call."""

    sliding: SlidingOp
    kernel: Kernel
    fill: float = 0.0


def _each(value: Sequence[int], count: int) -> list[int]:
    """One number per dim: a single one stands for all."""
    given = list(value)
    return given * count if len(given) == 1 else given


def _slides(
    image: tuple[int, ...],
    made: tuple[int, ...],
    kernel: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Sliding, ...]:
    count = len(kernel)
    first = len(image) - count
    stride, padding, dilation = (_each(v, count) for v in (stride, padding, dilation))
    return tuple(
        Sliding(
            first + d,
            image[first + d],
            made[first + d],
            dilation[d] * (kernel[d] - 1) + 1,
            stride[d],
            padding[d],
        )
        for d in range(count)
    )


def _unpadded(given: Given, pieces: Sequence[Piece]) -> Given:
    """The arguments without the padding that cut dims have been given already."""
    padding = _each(given["padding"], len(pieces))
    return {**given, "padding": [0 if p.cut else own for p, own in zip(pieces, padding, strict=True)]}


# --------------------------------------------------------------------------------------- convolutions


def _of_convolution(call: Call, made: tuple[int, ...]) -> tuple[Sliding, ...] | None:
    image, weight = call.arg("input").shape, call.arg("weight").shape
    if call.arg("transposed") or len(image) != len(weight):
        return None
    return _slides(
        image,
        made,
        weight[2:],
        stride=call.arg("stride"),
        padding=call.arg("padding"),
        dilation=call.arg("dilation"),
    )


def _forward_of_convolution(call: Call) -> tuple[Sliding, ...] | None:
    out = call.results[0]
    return None if out is None else _of_convolution(call, out.shape)


def _convolve_back(op: torch._ops.OpOverload, given: Given, pieces: Sequence[Piece]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = op(**_unpadded(given, pieces))
    return found


# --------------------------------------------------------------------------------------------- pooling


def _of_pool(call: Call) -> tuple[Sliding, ...] | None:
    """The windows of a pooling op; of integers means are rounded inside, so they are left alone."""
    info, out = call.arg("self"), call.results[0]
    made = call.arg("grad_output") if "grad_output" in call.bound else out
    if made is None or not info.dtype.is_floating_point:
        return None
    kernel: Sequence[int] = call.arg("kernel_size")
    count = 3 if "pool3d" in call.op._schema.name else 2
    kernel = _each(kernel, count)
    stride = _each(call.arg("stride") or kernel, count)
    dilation = call.arg("dilation") if "dilation" in call.bound else [1]
    return _slides(
        info.shape, made.shape, kernel, stride=stride, padding=call.arg("padding"), dilation=dilation
    )


def _max_pool(op: torch._ops.OpOverload, given: Given, pieces: Sequence[Piece]) -> tuple[Any, ...]:
    values, index = op(**_unpadded(given, pieces))
    sizes = given["self"].shape[-len(pieces) :]
    return values, _moved(index, sizes, [p.sliding.length for p in pieces], [p.start for p in pieces])


def _moved(index: Tensor, sizes: Sequence[int], others: Sequence[int], shift: Sequence[int]) -> Tensor:
    """Flat indices into dims of `sizes` as flat indices into dims of `others`, each dim's index shifted.

    An index outside is moved to the edge: that is where torch begins when nothing in a window is largest.
    """
    total = torch.zeros_like(index)
    for dim, (other, by) in enumerate(zip(others, shift, strict=True)):
        inner = prod(sizes[dim + 1 :])
        own = torch.remainder(torch.div(index, inner, rounding_mode="floor"), sizes[dim]) + by
        total = total * other + own.clamp_(0, max(0, other - 1))
    return total


def _max_pool_back(op: torch._ops.OpOverload, given: Given, pieces: Sequence[Piece]) -> tuple[Any, ...]:  # noqa: ARG001
    x, grad = given["self"], given["grad_output"]
    outer, sizes = x.shape[: -len(pieces)], x.shape[-len(pieces) :]
    lengths = [p.sliding.length for p in pieces]
    index = _moved(given["indices"], lengths, sizes, [-p.start for p in pieces])
    made = x.new_zeros(*outer, prod(sizes))
    made.scatter_add_(-1, index.flatten(len(outer)), grad.flatten(len(outer)))
    return (made.view(x.shape),)


def _mean_pool(op: torch._ops.OpOverload, given: Given, pieces: Sequence[Piece]) -> tuple[Any, ...]:
    local = _unpadded(given, pieces)
    if given.get("divisor_override") is not None:
        return (op(**local),)
    total = op(**{**local, "divisor_override": 1})
    return (total / _counts(total, given, pieces),)


def _mean_pool_back(op: torch._ops.OpOverload, given: Given, pieces: Sequence[Piece]) -> tuple[Any, ...]:
    local = _unpadded(given, pieces)
    if given.get("divisor_override") is not None:
        return (op(**local),)
    grad = given["grad_output"]
    grad = grad / _counts(grad, given, pieces)
    return (op(**{**local, "grad_output": grad, "divisor_override": 1}),)


def _counts(like: Tensor, given: Given, pieces: Sequence[Piece]) -> Tensor:
    """How many elements each window of this rank counts:  [made rows of every spatial dim]."""
    padded = given.get("count_include_pad", True)
    total = torch.ones((), dtype=like.dtype, device=like.device)
    for piece in pieces:
        s = piece.sliding
        start = torch.arange(*piece.rows, device=like.device) * s.stride - s.padding
        end = (start + s.extent).clamp_(max=s.length + s.padding)
        if not padded:
            start, end = start.clamp_(min=0), end.clamp_(max=s.length)
        total = total[..., None] * (end - start)
    return total


# ----------------------------------------------------------------------------------------- the table

_CONVOLUTION = WindowOp(
    SlidingOp("input", _forward_of_convolution), lambda op, given, pieces: (op(**_unpadded(given, pieces)),)
)
_CONVOLUTION_BACK = WindowOp(
    SlidingOp(
        "input",
        lambda call: _of_convolution(call, call.arg("grad_output").shape),
        like_result=("grad_output",),
        to_image=(0,),
        sums=(1, 2),
    ),
    _convolve_back,
)
_MAX_POOL = WindowOp(SlidingOp("self", _of_pool), _max_pool, fill=-torch.inf)
_MAX_POOL_BACK = WindowOp(
    SlidingOp("self", _of_pool, like_result=("grad_output", "indices"), to_image=(0,)), _max_pool_back
)
_MEAN_POOL = WindowOp(SlidingOp("self", _of_pool), _mean_pool)
_MEAN_POOL_BACK = WindowOp(
    SlidingOp("self", _of_pool, like_result=("grad_output",), to_image=(0,)), _mean_pool_back
)

WINDOW_OPS: Mapping[str, WindowOp] = {
    "aten::convolution": _CONVOLUTION,
    "aten::convolution_backward": _CONVOLUTION_BACK,
    "aten::max_pool2d_with_indices": _MAX_POOL,
    "aten::max_pool3d_with_indices": _MAX_POOL,
    "aten::max_pool2d_with_indices_backward": _MAX_POOL_BACK,
    "aten::max_pool3d_with_indices_backward": _MAX_POOL_BACK,
    "aten::avg_pool2d": _MEAN_POOL,
    "aten::avg_pool3d": _MEAN_POOL,
    "aten::avg_pool2d_backward": _MEAN_POOL_BACK,
    "aten::avg_pool3d_backward": _MEAN_POOL_BACK,
}
