"""What a rank calls in place of an op whose kernel, for a local tensor, is not that of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardwright.compat import DispatchKey, exclude_key, is_key_excluded
from shardwright.layout.dtypes import HALF
from shardwright.rules.call import Args, Kwargs
from shardwright.tensor.dispatch.grouped_products import grouped_mm
from shardwright.tensor.dispatch.memory_order import is_dense

_BIAS_ROWS = 16  # elements


def _with_aligned_bias(func: torch._ops.OpOverload, *args: Any, **named: Any) -> Any:
    """Attention whose bias has rows that begin where CUDA's kernel wants them, as torch lays a whole one."""
    place = [argument.name for argument in func._schema.arguments].index("attn_bias")
    bias = args[place] if place < len(args) else None
    if bias is None or all(step % _BIAS_ROWS == 0 for step in bias.stride()[:-1]):
        return func(*args, **named)
    width = bias.shape[-1]
    padded = bias.new_zeros(*bias.shape[:-1], width + -width % _BIAS_ROWS)[..., :width].copy_(bias)
    return func(*args[:place], padded, *args[place + 1 :], **named)


def _with_buffer(func: torch._ops.OpOverload, *args: Any, **named: Any) -> Any:
    """A log-sigmoid with its second result, which CUDA's kernel leaves without elements."""
    out, buffer = func(*args, **named)
    return out, buffer if named or buffer.shape == out.shape else torch.zeros_like(out)


# Their operands must lie in memory as the parts of a tensor need not, or they leave out what the CPU's make.
_OF_THEIR_OWN: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": grouped_mm,
    "aten::_scaled_dot_product_efficient_attention": _with_aligned_bias,
    "aten::_scaled_dot_product_efficient_attention_backward": _with_aligned_bias,
    "aten::log_sigmoid_forward": _with_buffer,
}
# They conjugate lazily inside and need the dispatch key that resolves it. Below `__torch_dispatch__` torch
# has excluded that key, for any subclass and any mode: a kernel that multiplies by `x.conj()` of its own then
# multiplies by `x`, at least where the product is small enough for torch's own loop. Found by comparing every
# operator of torch's database with one device, and random programs; the others conjugate at once.
_CONJUGATE_INSIDE = frozenset({"aten::linalg_lstsq", "aten::linalg_pinv"})

# Their kernel breaks on half products of rows of one element, which a part of longer rows may have.
_NOT_OF_ONE_ELEMENT = frozenset({"aten::index_reduce", "aten::index_reduce_"})

# Their kernels on the CPU walk all tensors of a position as one stretch of memory, and ask nothing.
_LINEAR = frozenset({
    "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_",
})  # fmt: skip


def kernel_of(func: torch._ops.OpOverload, dtypes: set[torch.dtype]) -> Callable[..., Any] | None:
    """What to call in place of the op on operands of these dtypes; None: the op."""
    name = func._schema.name
    if name in _OF_THEIR_OWN:
        return partial(_OF_THEIR_OWN[name], func)
    if is_linear(func):
        return partial(_of_dense, func)
    if name in _CONJUGATE_INSIDE and any(dtype.is_complex for dtype in dtypes):
        return partial(resolving_conjugates, func)
    if name in _NOT_OF_ONE_ELEMENT and dtypes & HALF:
        return partial(_of_wider_rows, func)
    return None


def is_linear(func: torch._ops.OpOverload) -> bool:
    """Does its kernel trust that the tensors of a position lie alike and without gaps?"""
    return func._schema.name in _LINEAR


def _of_dense(func: torch._ops.OpOverload, *args: Any, **named: Any) -> Any:
    """A fused step whose parameters, gradients and states are laid alike for the kernel, where they are not.

    A part of a cut dim may be a view of the tensor that was cut; on one device parameters have no gaps.
    """
    given = [list(values) if isinstance(values, list | tuple) else values for values in args]
    lists = [values for values in given if isinstance(values, list)]
    laid = []
    for place, x in enumerate(lists[0]):
        each = [values for values in lists if place < len(values) and values[place].shape == x.shape]
        if all(_lies_as(values[place], x) for values in each):
            continue
        for values in each:
            own = values[place]
            values[place] = own.contiguous()
            laid.append((own, values[place]))
    out = func(*given, **named)
    for own, dense in laid:
        if own is not dense:
            own.copy_(dense)
    return out


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_contiguous() and other.is_contiguous():
        return True
    return one.stride() == other.stride() and is_dense(one.shape, one.stride())


def resolving_conjugates(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it with tensors that say they are conjugates carried out before each kernel that does not know."""
    return with_keys((DispatchKey.Conjugate,), func, args, kwargs)


def with_keys(keys: Sequence[DispatchKey], func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Call it with these keys of dispatch at work, which are left out below."""
    before = [is_key_excluded(key) for key in keys]
    try:
        for key in keys:
            exclude_key(key, False)
        return func(*args, **kwargs)
    finally:
        for key, excluded in zip(keys, before, strict=True):
            exclude_key(key, excluded)


def _of_wider_rows(
    func: torch._ops.OpOverload,
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> torch.Tensor:
    """Rows of one element are made twice as wide for the kernel."""
    if x.dim() < 2 or x.numel() != x.shape[dim]:
        made: torch.Tensor = func(x, dim, index, source, *rest, **named)
        return made
    twice = [torch.stack([t, t], -1) for t in (x, source)]
    made = torch.ops.aten.index_reduce(twice[0], dim % x.dim(), index, twice[1], *rest, **named)[..., 0]
    return x.copy_(made) if func._schema.is_mutable else made.contiguous()
