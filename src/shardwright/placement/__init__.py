"""Placements: what one mesh axis does to a tensor, and the regions that follow from it. No process groups."""

from shardwright.index.boxes import Chunk, chunks_of
from shardwright.index.region import Box, Region
from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, Pending, Placement, Replicate
from shardwright.placement.block_cyclic import BlockCyclic
from shardwright.placement.convert import as_placement
from shardwright.placement.fused import Fused
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.made_by_views.flat import Flat
from shardwright.placement.made_by_views.imaged import Imaged
from shardwright.placement.made_by_views.joint import Joint
from shardwright.placement.made_by_views.moved import Moved
from shardwright.placement.made_by_views.nested import Nested
from shardwright.placement.made_by_views.sliced import Sliced
from shardwright.placement.made_by_views.spread import Spread
from shardwright.placement.made_by_views.together import Together
from shardwright.placement.owner import Owner
from shardwright.placement.partial import Partial
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.placement.zigzag import ZigZag

__all__ = [
    "AlongDim",
    "BlockCyclic",
    "Box",
    "Chunk",
    "Flat",
    "Fused",
    "Imaged",
    "Interleaved",
    "Joint",
    "Moved",
    "Nested",
    "Owner",
    "Partial",
    "Partition",
    "Pending",
    "Placement",
    "Ragged",
    "Region",
    "Replicate",
    "Shard",
    "Sliced",
    "Spread",
    "Together",
    "ZigZag",
    "as_placement",
    "chunks_of",
]
