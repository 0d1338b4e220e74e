"""What people hand over to be shown: a layout, a distributed tensor of ours or of torch, a plain tensor."""

from __future__ import annotations

from typing import Any

from shardwright.layout.layout import Layout


def layout_of(value: Any) -> Layout | None:
    """Its layout; that of torch's own DTensor from mesh and placements; None for a plain tensor."""
    if isinstance(value, Layout):
        return value
    layout = getattr(value, "layout", None)
    if isinstance(layout, Layout):
        return layout
    mesh, placements = getattr(value, "device_mesh", None), getattr(value, "placements", None)
    if mesh is None or placements is None:
        return None
    return Layout(mesh, placements, value.shape, dtype=value.dtype, stride=value.stride())
