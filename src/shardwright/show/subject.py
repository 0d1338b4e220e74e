"""What people hand over to be shown: a layout, a distributed tensor of ours or of torch, a plain tensor."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_of


def layout_if_any(value: Any) -> Layout | None:
    """Its layout; None for a plain tensor."""
    if isinstance(value, Layout):
        return value
    return layout_of(value) if isinstance(value, DTensor) else None
