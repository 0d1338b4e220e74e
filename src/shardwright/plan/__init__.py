"""Redistribution as data: what moves between two layouts, and the least that could."""

from shardwright.plan.buckets import Packing, pack_blocks
from shardwright.plan.plan import Plan
from shardwright.plan.redistribution import plan_redistribution

__all__ = ["Packing", "Plan", "pack_blocks", "plan_redistribution"]
