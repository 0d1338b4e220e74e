"""Placements: what one mesh axis does to a tensor, and the regions that follow from it. No process groups."""

from shardwright.placement.along_dim import AlongDim
from shardwright.placement.base import Partition, Pending, Placement, Replicate
from shardwright.placement.block_cyclic import BlockCyclic
from shardwright.placement.chunks import Chunk, chunks_of
from shardwright.placement.convert import as_placement
from shardwright.placement.flat import Flat
from shardwright.placement.imaged import Imaged
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.joint import Joint
from shardwright.placement.moved import Moved
from shardwright.placement.nested import Nested
from shardwright.placement.owner import Owner
from shardwright.placement.partial import Partial
from shardwright.placement.ragged import Ragged
from shardwright.placement.region import Box, Region
from shardwright.placement.shard import Shard
from shardwright.placement.sliced import Sliced
from shardwright.placement.spread import Spread
from shardwright.placement.zigzag import ZigZag

__all__ = [
    "AlongDim",
    "BlockCyclic",
    "Box",
    "Chunk",
    "Flat",
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
    "ZigZag",
    "as_placement",
    "chunks_of",
]
