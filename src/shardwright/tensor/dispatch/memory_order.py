"""The order of a tensor's elements in memory, as a kernel made it and as a derivative takes it to be.

A layout's strides are those of one device, as torch's functions for tensors without data state them. Those
err here and there (`linalg.svd`, transforms of several dims): what a kernel made of whole operands is then
what one device has. And where a local tensor lies in another order than its layout says (`from_local` with
strides), a derivative that looks at the strides must not be misled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from shardwright.compat import suggest_memory_format, tree_map_only
from shardwright.errors import RuleError
from shardwright.index.stride import contiguous_stride, stride_like
from shardwright.placement.base import Replicate
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.catalog.attention import ATTENTION
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import with_stride, wrap

Call = Callable[[Op, tuple[Any, ...], Mapping[str, Any]], Any]
Lay = Callable[[torch.Tensor, DTensor], torch.Tensor]


def as_described(route: Call, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The op on operands that lie as it needs them."""
    return route(func, LAID_FIRST[func._schema.name](func, args), kwargs)


def _as_the_matrix_says(local: torch.Tensor, x: DTensor) -> torch.Tensor:
    """Their kernels factor the matrix or its transpose, whichever lies in columns.

    Their derivatives ask `A.is_contiguous()` to know which it was (torch's FunctionsManual,
    `linalg_det_backward`).
    """
    said = x.is_contiguous()
    if local.is_contiguous() == said:
        return local
    return local.contiguous() if said else local.mT.contiguous().mT


def _with_rows_in_one_piece(local: torch.Tensor, x: DTensor) -> torch.Tensor:
    """Their kernels step through a row by 1, as the whole does. Logs of sums lie as they were made."""
    return local if local.dim() < 4 or local.stride(-1) == x.stride(-1) else local.contiguous()


def _in_one_format(func: Op, args: Args) -> tuple[Any, ...]:
    """Their kernels on the CPU take all operands to lie in the memory format of the input.

    Raises: RuleError (a RuntimeError): one device refuses it, so a rank that has nothing does too.
    """
    x = args[0] if func._schema.name == "aten::native_group_norm" else None
    if isinstance(x, DTensor) and not x.is_contiguous(memory_format=suggest_memory_format(x)):
        raise RuleError(f"{func.name()}: expected X.is_contiguous(memory_format) to be true, but got false")
    return _each(_laid_as_said, func, args)


def _each_in_its_place(_func: Op, args: Args) -> tuple[Any, ...]:
    """Their kernels sort a copy in place that may have elements in one place, as an expanded tensor has."""
    x, *rest = args
    if not isinstance(x, DTensor) or 0 not in (*x.stride(), *x._local_tensor.stride()):
        return args
    dense = wrap(x._local_tensor.clone(memory_format=torch.contiguous_format), x._spec)
    return with_stride(dense, contiguous_stride(x._spec.layout.shape)), *rest


def _each(lay: Lay, _func: Op, args: Args) -> tuple[Any, ...]:
    """The operands, each laid by itself."""

    def laid(x: DTensor) -> DTensor:
        local = lay(x._local_tensor, x)
        return x if local is x._local_tensor else wrap(local, x._spec)

    every: tuple[Any, ...] = tree_map_only(DTensor, laid, args)
    return every


def _laid_as_said(local: torch.Tensor, x: DTensor) -> torch.Tensor:
    if lies_as_said(local, x):
        return local
    shape = tuple(local.shape)
    stride = stride_like(shape, x._spec.layout.stride)
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=local.device).copy_(local)


# By op: how each operand must lie, before a way is chosen and once more after moves, which lay it anew.
LAYS: dict[str, Lay] = {
    **dict.fromkeys(("aten::_linalg_det", "aten::_linalg_slogdet"), _as_the_matrix_says),
    **dict.fromkeys(("aten::native_group_norm", "aten::native_group_norm_backward"), _laid_as_said),
    **dict.fromkeys((*ATTENTION, *(f"{name}_backward" for name in ATTENTION)), _with_rows_in_one_piece),
}
# Ops whose derivative looks at the strides of their operands, or whose kernel trusts them.
LAID_FIRST: dict[str, Callable[[Op, tuple[Any, ...]], tuple[Any, ...]]] = {
    **{name: partial(_each, lay) for name, lay in LAYS.items()},
    **dict.fromkeys(("aten::native_group_norm", "aten::native_group_norm_backward"), _in_one_format),
    **dict.fromkeys(("aten::median", "aten::nanmedian"), _each_in_its_place),
}


def lies_as_said(local: torch.Tensor, x: DTensor) -> bool:
    """Are the elements of an operand, moved or not, in the order that its layout states?"""
    shape, said = tuple(local.shape), x._spec.layout.stride
    return local.stride() == said or _order(shape, local.stride()) == _order(shape, stride_like(shape, said))


def as_made(spec: Spec, local: torch.Tensor) -> Spec:
    """The spec of a new result with the strides of the local tensor, where every rank made all of it."""
    layout, stride = spec.layout, tuple(local.stride())
    if not all(isinstance(p, Replicate) for p in layout.placements) or not is_dense(local.shape, stride):
        return spec
    if _order(local.shape, stride) == _order(local.shape, layout.stride):
        return spec
    return spec_of(layout.with_shape(layout.shape, stride), spec.mesh, spec.use)


def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The dims of more than one element, the slowest first."""
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -stride[dim])


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Does each element have a place of its own, without gaps between them?"""
    step = 1
    for dim in reversed(_order(shape, stride)):
        if stride[dim] != step:
            return False
        step *= shape[dim]
    return step > 0
