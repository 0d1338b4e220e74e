"""Redistribution as data: what moves between two layouts, and the least that could."""

from shardwright.plan.buckets import Packing, pack_blocks
from shardwright.plan.decide import plan_redistribution
from shardwright.plan.network import Network
from shardwright.plan.plan import Plan

__all__ = ["Network", "Packing", "Plan", "pack_blocks", "plan_redistribution"]
