"""Layouts: where each element of a tensor lives on a mesh. Pure: no process group, no communication."""

from shardwright.layout.arrangement import OrderedPlacements
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.layout.of_tensor import layout_of
from shardwright.layout.partition_spec import from_partition_spec, to_partition_spec
from shardwright.layout.strided import same_regions, to_strided

__all__ = [
    "Layout",
    "MeshShape",
    "OrderedPlacements",
    "from_partition_spec",
    "layout_of",
    "same_regions",
    "to_partition_spec",
    "to_strided",
]
