"""In which order kernels put the elements of their results, where torch's functions without data do not say.

Those follow what other devices do (factors and transforms), leave out memory formats (padding, shuffles), or
follow an operand where the kernel does not (derivatives of losses). Whether a view is one, and which kernels
a derivative may trust, depends on it: so the order must be one device's, and the same on every rank, which
see parts of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.compat import (
    FakeTensorMode,
    suggest_memory_format,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from shardwright.remember import remembered
from shardwright.rules.call import Args, Kwargs, Op

Order = Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]

# A function of torch that knows the device says it.
_BY_DEVICE = frozenset({
    "aten::convolution", "aten::convolution_backward", "aten::_linalg_svd", "aten::linalg_eig",
    "aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c",
})  # fmt: skip


def _in_the_format_of(place: int) -> Order:
    """In the memory format of an operand: contiguous, or with channels last."""

    def order(args: Args, made: torch.Tensor) -> torch.Tensor:
        return _laid(made, suggest_memory_format(args[place]))

    return order


def _as_a_product(args: Args, made: torch.Tensor) -> torch.Tensor:
    order = torch.mul(args[0], args[1]).stride()
    return torch.empty_strided(made.shape, order, dtype=made.dtype, device="meta")


def _laid(made: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    if made.dim() not in _FORMATS.get(memory_format, (made.dim(),)):
        memory_format = torch.contiguous_format
    return torch.empty_like(made, memory_format=memory_format)


_FORMATS = {torch.channels_last: (4,), torch.channels_last_3d: (5,)}

# By op: the order of its first result on the CPU; `log_sigmoid_forward` has it for both.
_ON_CPU: dict[str, Order] = {
    **dict.fromkeys(
        (
            "aten::reflection_pad2d", "aten::reflection_pad3d", "aten::replication_pad2d",
            "aten::replication_pad3d", "aten::channel_shuffle", "aten::pixel_shuffle",
            "aten::pixel_unshuffle", "aten::max_unpool2d", "aten::native_batch_norm",
            "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training",
            "aten::_batch_norm_with_update", "aten::native_channel_shuffle",
        ),
        _in_the_format_of(0),
    ),
    **dict.fromkeys(
        (
            "aten::reflection_pad2d_backward", "aten::reflection_pad3d_backward",
            "aten::replication_pad2d_backward", "aten::replication_pad3d_backward",
        ),
        _in_the_format_of(1),
    ),
    **dict.fromkeys(
        (
            "aten::huber_loss_backward", "aten::smooth_l1_loss_backward", "aten::mse_loss_backward",
            "aten::log_sigmoid_forward", "aten::normal", "aten::_log_softmax_backward_data",
            "aten::glu_backward", "aten::nll_loss2d_forward", "aten::masked_fill", "aten::isin",
        ),
        lambda _args, made: _laid(made, torch.contiguous_format),
    ),
    "aten::native_dropout_backward": _as_a_product,
}  # fmt: skip


def _of_a_base(args: Args, made: torch.Tensor) -> Any:
    """In the order of the dims where the base is a number; else as two operands are."""
    base_is_number = not isinstance(args[0], torch.Tensor)
    return _laid(made, torch.contiguous_format) if base_is_number else _as_a_sum(args, made)


# By op: on every device.
_ANYWHERE: dict[str, Order] = {"aten::pow": _of_a_base}
# By name; of those that go element by element, all have an order of their own.
KERNELS = _BY_DEVICE | _ON_CPU.keys()


def as_kernels_put_them(func: Op, args: Args, kwargs: Kwargs, made: Any, device: str) -> Any:
    """The results of an op without data, with the strides that its kernel on this device gives.

    Args: func: one of `KERNELS`, or pointwise. args, kwargs: with tensors without data.
    """
    name = func._schema.name
    if name in _BY_DEVICE:
        return _knowing_the_device(func, args, kwargs, made, device)
    order = _ANYWHERE.get(name) or (_ON_CPU.get(name) if device == "cpu" else None)
    if order is None or (name in _ANYWHERE and func._schema.is_mutable):
        return made if func._schema.is_mutable else _as_a_sum(args, made)
    leaves, tree = tree_flatten(made)
    count = 2 if name == "aten::log_sigmoid_forward" else 1
    return tree_unflatten([*(order(args, x) for x in leaves[:count]), *leaves[count:]], tree)


def _knowing_the_device(func: Op, args: Args, kwargs: Kwargs, made: Any, device: str) -> Any:
    """The same with the strides that torch gives tensors without data that know their device."""
    mode = _mode()

    def there(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with mode:
        given, named = tree_map_only(torch.Tensor, there, (args, dict(kwargs)))
        found = func(*given, **named)
    strides = iter([x.stride() for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)])
    return tree_map_only(
        torch.Tensor,
        lambda x: torch.empty_strided(x.shape, next(strides), dtype=x.dtype, device="meta"),
        made,
    )


def _as_a_sum(args: Args, made: Any) -> Any:
    """An op of each element of two operands: torch's functions in Python have an order of their own."""
    if not isinstance(made, torch.Tensor):
        return made
    pair = [x for x in args if isinstance(x, torch.Tensor)]
    if len(pair) != 2 or all(x.is_contiguous() for x in (*pair, made)):
        return made
    with_order = torch.add(*(torch.empty_strided(x.shape, x.stride(), device="meta") for x in pair))
    if with_order.shape != made.shape:
        return made
    return torch.empty_strided(made.shape, with_order.stride(), dtype=made.dtype, device="meta")


@remembered(1)
def _mode() -> FakeTensorMode:
    return FakeTensorMode()
