"""The order of a tensor's elements in memory, as a kernel made it and as a derivative takes it to be.

A layout's strides are those of one device, as torch's functions for tensors without data state them. Those
err here and there (`linalg.svd`, transforms of several dims): what a kernel made of whole operands is then
what one device has. And where a local tensor lies in another order than its layout says (`from_local` with
strides), a derivative that looks at the strides must not be misled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.compat import suggest_memory_format, tree_map_only
from shardwright.errors import RuleError
from shardwright.index.stride import stride_like
from shardwright.placement.base import Replicate
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import wrap

Call = Callable[[torch._ops.OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]

# Their kernels factor the matrix or its transpose, whichever lies in columns, and their derivatives ask
# `A.is_contiguous()` to know which it was (torch's FunctionsManual, `linalg_det_backward`).
_FACTORED_AS_IT_LIES = frozenset({"aten::_linalg_det", "aten::_linalg_slogdet"})


# Their kernels on the CPU take all operands to lie in the memory format of the input.
_TRUSTS_FORMATS = frozenset({"aten::native_group_norm", "aten::native_group_norm_backward"})


def asks(func: torch._ops.OpOverload) -> bool:
    """Does the op's derivative look at the strides of its operand, or its kernel trust them?"""
    return func._schema.name in _FACTORED_AS_IT_LIES | _TRUSTS_FORMATS


def as_described(
    route: Call, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The op on operands whose local tensors lie as the operands say."""
    if func._schema.name in _TRUSTS_FORMATS:
        _refuse_no_format(func, args)
        return route(func, tree_map_only(DTensor, _laid_as_said, args), kwargs)
    x, *rest = args
    if isinstance(x, DTensor):
        local, said = x._local_tensor, x.is_contiguous()
        if local.is_contiguous() != said:
            local = local.contiguous() if said else local.mT.contiguous().mT
            args = (wrap(local, x._spec), *rest)
    return route(func, args, kwargs)


def _refuse_no_format(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Raises: RuleError (a RuntimeError): one device refuses it, so a rank that has nothing does too."""
    x = args[0] if func._schema.name == "aten::native_group_norm" else None
    if isinstance(x, DTensor) and not x.is_contiguous(memory_format=suggest_memory_format(x)):
        raise RuleError(f"{func.name()}: expected X.is_contiguous(memory_format) to be true, but got false")


def _laid_as_said(x: DTensor) -> DTensor:
    local = x._local_tensor
    if lies_as_said(local, x):
        return x
    shape = tuple(local.shape)
    laid = torch.empty_strided(
        shape, stride_like(shape, x._spec.layout.stride), dtype=x.dtype, device=local.device
    )
    return wrap(laid.copy_(local), x._spec)


def lies_as_said(local: torch.Tensor, x: DTensor) -> bool:
    """Are the elements of an operand, moved or not, in the order that its layout states?"""
    shape, said = tuple(local.shape), x._spec.layout.stride
    return local.stride() == said or _order(shape, local.stride()) == _order(shape, stride_like(shape, said))


def as_made(spec: Spec, local: torch.Tensor) -> Spec:
    """The spec of a new result with the strides of the local tensor, where every rank made all of it."""
    layout, stride = spec.layout, tuple(local.stride())
    if not all(isinstance(p, Replicate) for p in layout.placements) or not _is_dense(local.shape, stride):
        return spec
    if _order(local.shape, stride) == _order(local.shape, layout.stride):
        return spec
    return spec_of(layout.with_shape(layout.shape, stride), spec.mesh, spec.use)


def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The dims of more than one element, the slowest first."""
    return sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -stride[dim])


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    step = 1
    for dim in reversed(_order(shape, stride)):
        if stride[dim] != step:
            return False
        step *= shape[dim]
    return step > 0
