"""For those who test what they add: ranks on one machine, and checks of placements and rules."""

from shardwright.remember import forget
from shardwright.testing.check_placement import BrokenLawError, PlacementLaws, check_placement
from shardwright.testing.check_rule import RuleReport, check_rule
from shardwright.testing.meshes import rank_mesh
from shardwright.testing.pool import RankPool
from shardwright.testing.rank_errors import RankError, RankTimeoutError
from shardwright.testing.simulate import RuleCheckError, Sample

__all__ = [
    "BrokenLawError",
    "PlacementLaws",
    "RankError",
    "RankPool",
    "RankTimeoutError",
    "RuleCheckError",
    "RuleReport",
    "Sample",
    "check_placement",
    "check_rule",
    "forget",
    "rank_mesh",
]
