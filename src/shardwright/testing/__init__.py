"""For those who test what they add: ranks on one machine, and checks of placements and rules."""

from shardwright.testing.meshes import rank_mesh
from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError

__all__ = ["RankError", "RankPool", "RankTimeoutError", "rank_mesh"]
