"""The view from the tensor's side: per dim, which axes cut it. As JAX's PartitionSpec writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.errors import LayoutError, as_several, refuse_other_kind
from shardwright.layout.arrangement import OrderedPlacements
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import as_mesh_shape
from shardwright.layout.text import plain_cut
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.shard import Shard

Entry = str | tuple[str, ...] | None
_SPEC = 'one entry for each dim, a name, several names or None: ("dp", ("tp", "cp"), None)'


def to_partition_spec(layout: Layout) -> tuple[Entry, ...]:
    """Per dim: None, an axis name, or a tuple of names, outermost (first applied) first.

    Raises: LayoutError: a placement is not a plain cut of one dim, which a partition spec cannot say.
    """
    refuse_other_kind("to_partition_spec: layout", layout, Layout, LayoutError, fix="sw.layout_of(tensor)")
    cuts: list[list[str]] = [[] for _ in layout.shape]
    for axis in layout.order:
        placement = layout.placements[axis]
        dim = plain_cut(placement)
        if dim is not None:
            cuts[dim].append(layout.axes[axis])
        elif not placement.is_replicated:
            raise LayoutError(
                f"{placement.text()} on axis {layout.axes[axis]} cannot be said in a partition spec, which "
                "knows only plain cuts of one dim; redistribute that axis to Shard or Replicate first"
            )
    return tuple(_entry(names) for names in cuts)


def _entry(names: list[str]) -> Entry:
    if not names:
        return None
    return names[0] if len(names) == 1 else tuple(names)


def from_partition_spec(mesh: Any, spec: Sequence[Entry]) -> OrderedPlacements:
    """One placement per axis, with the order of application as `.order` (None: left to right).

    Raises: LayoutError: an axis is named twice. MeshError: an axis does not exist.
    """
    shape = as_mesh_shape(mesh)
    placements: list[Placement] = [Replicate()] * len(shape.axes)
    order: list[str] = []
    entries = as_several("from_partition_spec: spec", spec, LayoutError, fix=_SPEC)
    cuts = [_axis_names(entry) for entry in entries]
    for dim, names in enumerate(cuts):
        for name in names:
            if name in order:
                raise LayoutError(f"partition spec {entries} names axis {name} twice; an axis cuts one dim")
            placements[shape.axis_index(name)] = Shard(dim)
            order.append(name)
    left_to_right = all(list(names) == sorted(names, key=shape.axes.index) for names in cuts)
    return OrderedPlacements(placements, None if left_to_right else order)


def _axis_names(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return as_several("from_partition_spec: an entry", entry, LayoutError, fix=_SPEC)
