"""Random ops equal to one device's: every rank draws for the whole logical tensor and keeps its part.

Law: with the generators of all ranks in the same state, neither placements nor world size change the result.
Cost: no communication; time and transient memory of the full tensor on every rank.
Source: the same law as a single device's generator, which numbers elements in logical order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.tensor.api import own_part
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local import replicated
from shardwright.tensor.spec import Spec, coords_of, spec_of, with_dtype
from shardwright.tensor.wrap import wrap

aten = torch.ops.aten


def draw(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One random op on DTensors, in the layout of its first operand."""
    x: DTensor = args[0]
    if func is aten.native_dropout.default:
        return _dropout(x, args[1], args[2] if len(args) > 2 else kwargs.get("train", True))
    if func._schema.is_mutable:
        return _in_place(func, x, args[1:], kwargs)
    return _like(func, x, args[1:], kwargs)


def _dropout(x: DTensor, p: float, train: bool | None) -> tuple[DTensor, DTensor]:
    """Linear in x for a given mask, so a pending sum stays pending."""
    ones = torch.ones(x.layout.shape, dtype=x.dtype, device=x._local_tensor.device)
    scaled, mask = aten.native_dropout(ones, p, train)
    placements = tuple(Replicate() if q.is_pending else q for q in x.layout.placements)
    layout = x.layout.with_placements(placements, order=x.layout.order_names)
    kept = cast(DTensor, x * _part(scaled, layout, x))
    return kept, _part(mask, with_dtype(layout, mask.dtype), x)


def _in_place(
    func: torch._ops.OpOverload, x: DTensor, rest: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    whole = torch.empty(x.layout.shape, dtype=x.dtype, device=x._local_tensor.device)
    func(whole, *_whole(rest), **kwargs)
    coords = coords_of(x.device_mesh)
    if coords is not None:
        x._local_tensor.copy_(x.layout.split(whole, coords))
    return x


def _like(
    func: torch._ops.OpOverload, x: DTensor, rest: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    """New random tensors; where the op reads values (bernoulli, multinomial) the operand is gathered."""
    reads = "_like" not in func._schema.name
    source = replicated(x)._local_tensor if reads else torch.empty(x.layout.shape, dtype=x.dtype)
    whole = func(source, *_whole(rest), **kwargs)
    keeps_shape = tuple(whole.shape) == tuple(x.layout.shape)
    placements = tuple(p if keeps_shape and not p.is_pending else Replicate() for p in x.layout.placements)
    layout = Layout(x.device_mesh, placements, tuple(whole.shape), dtype=whole.dtype)
    return _part(whole, layout, x)


def _whole(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(replicated(v)._local_tensor if isinstance(v, DTensor) else v for v in values)


def _part(whole: torch.Tensor, layout: Layout, like: DTensor) -> DTensor:
    coords = coords_of(like.device_mesh)
    local = whole.new_empty(0) if coords is None else own_part(whole, layout, coords)
    spec: Spec = spec_of(layout, like.device_mesh, like._spec.use)
    return wrap(local, spec)
