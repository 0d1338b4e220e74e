"""Dropout of plain tensors, and noise of their rows, drawn by the logical index in the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from shardwright.compat import TorchDispatchMode
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.rules.call import Args
from shardwright.rules.op import by_name
from shardwright.tensor.random.counter import leaky
from shardwright.tensor.random.logical_draws import ALONE, draw_of_rows, is_plain
from shardwright.tensor.random.philox import blocks, split_key
from shardwright.tensor.random.rows import Scope
from shardwright.tensor.random.source import CounterSource, draw_key

aten = torch.ops.aten
_PER_BLOCK = 4
# Kernels that drop inside, and where their probability stands: what they drop cannot be said from outside.
_INSIDE = MappingProxyType(
    {
        "_scaled_dot_product_flash_attention": "dropout_p",
        "_scaled_dot_product_flash_attention_for_cpu": "dropout_p",
        "_scaled_dot_product_efficient_attention": "dropout_p",
        "_scaled_dot_product_cudnn_attention": "dropout_p",
        "_cudnn_rnn": "dropout",
    }
)


class LogicalMode(TorchDispatchMode):
    """Within it, masks and noise of plain tensors follow from their place in the batch; the rest is as ever.

    Not for DTensors: `random_mode("counter")` draws theirs.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scope = scope

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draw = _DRAWN.get(func)
        if draw is not None and is_plain(args[0]) and kwargs.get("generator") is None:
            return draw(self._scope, *args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in _INSIDE:
            _refuse_inside(func, name, args, kwargs)
        made = draw_of_rows(self._scope, func, args, kwargs)
        return func(*args, **kwargs) if made is NotImplemented else made


def _kept(scope: Scope, x: Tensor, keep: float) -> Tensor:
    """Which elements of x stay, by 32 bits each; bool, in the shape of x."""
    key = draw_key(None)
    start = scope.rows_of(key).first_of(tuple(x.shape))
    first, last = start // _PER_BLOCK, -(-(start + x.numel()) // _PER_BLOCK)
    index = torch.arange(first, last, device=x.device)
    words = torch.stack(blocks(index, split_key(key)), dim=-1).reshape(-1)
    return (words[start - first * _PER_BLOCK :][: x.numel()] < round(keep * 2**32)).reshape(x.shape)


def _bernoulli(scope: Scope, x: Tensor, p: float = 0.5, *, generator: None = None) -> Tensor:  # noqa: ARG001
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    return x.copy_(_kept(scope, x, p))


def _native_dropout(scope: Scope, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    keep = 1.0 - p if train or train is None else 1.0
    mask = _kept(scope, x, keep)
    return x * mask * (0.0 if keep == 0 else 1.0 / keep), mask


def _random_slopes(
    scope: Scope,
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: None = None,  # noqa: ARG001
) -> Tensor:
    if not training:
        return leaky_relu(x, (lower + upper) / 2)
    key = draw_key(None)
    layout = Layout(ALONE, (Replicate(),), tuple(x.shape), dtype=x.dtype)
    source = CounterSource(key, layout, (0,), x.device, scope.rows_of(key))
    return leaky(x, noise, source.slopes(x.dtype), lower, upper)


_DRAWN: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: _bernoulli,
    aten.native_dropout.default: _native_dropout,
    aten.rrelu_with_noise.default: _random_slopes,
    aten.rrelu_with_noise_.default: lambda scope, x, *args, **kwargs: x.copy_(
        _random_slopes(scope, x, *args, **kwargs)
    ),
}


def _refuse_inside(func: Any, name: str, args: Args, kwargs: dict[str, Any]) -> None:
    """Raise RuleError for a kernel that drops by itself."""
    given = by_name(func, args, kwargs)
    chance = given.get(_INSIDE[name]) or 0.0
    if chance and not math.isclose(chance, 0.0) and given.get("train", True):
        raise RuleError(
            f"logical dropout: {name} drops with p={chance} inside of a kernel, in an order of its own\n"
            "  fix: torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the attention, or no dropout of "
            "its weights"
        )
