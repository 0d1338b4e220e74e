"""The layout of a tensor that exists: what its spec says, in our words."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.compat import DTensorSpec, shard_order_axes
from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout


def layout_of(x: torch.Tensor) -> Layout:
    """Where each element of a DTensor lives: mesh axes, placements, order, logical shape, stride, dtype.

    Args: x: a DTensor of this library or of torch, parameters under any strategy included.
    Raises: LayoutError: a plain tensor. `x.layout` is another thing, torch's: `torch.strided`.
    Cost: none.
    """
    if not isinstance(x, DTensor):
        raise LayoutError(
            f"a plain {type(x).__name__} has no Layout: every rank holds its own\n"
            "  fix: place it first, with sw.distribute_tensor or DTensor.from_local"
        )
    return layout_of_spec(x._spec)


def layout_if_any(value: Any) -> Layout | None:
    """A layout itself, or that of a DTensor; None for a plain tensor."""
    if isinstance(value, Layout):
        return value
    return layout_of(value) if isinstance(value, DTensor) else None


def layout_of_spec(spec: DTensorSpec) -> Layout:
    """The layout that a spec means, torch's own specs included.

    Raises: LayoutError: the spec has no tensor metadata.
    """
    known = getattr(spec, "layout", None)
    if isinstance(known, Layout):
        return known
    meta = spec.tensor_meta
    if meta is None:
        raise LayoutError("a DTensorSpec without tensor_meta has no logical shape, so no layout")
    placements, order = shard_order_axes(spec)
    return Layout(
        spec.mesh, placements, tuple(meta.shape), dtype=meta.dtype, stride=tuple(meta.stride), order=order
    )
