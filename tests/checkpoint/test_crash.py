"""A run that dies between any two file operations leaves a checkpoint that is complete, and says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.testing.rank_errors import RankError
from tests.checkpoint.faults.ranks import Ranks, attempts
from tests.tiers import all_but, only


@pytest.mark.parametrize(("rank", "operations"), all_but([(0, 12), (1, 2)], [(0, 12), (1, 2)]))
def test_a_save_that_dies_commits_the_whole_or_nothing_and_can_be_repeated(
    ranks: Ranks, tmp_path: Path, rank: int, operations: int
) -> None:
    *died, lived = attempts(ranks, tmp_path, "save", rank)
    assert len(died) >= operations
    assert all(one["unusable"] == [] for one in (*died, lived))
    assert [one["chosen"] for one in died] == sorted(one["chosen"] for one in died)
    assert died[0]["chosen"] == 2
    assert lived["chosen"] == 3
    assert all(one["afterwards"] == ["step-00000003"] for one in (*died, lived))


@pytest.mark.parametrize("rank", all_but([1], [0, 1]))
def test_a_replacement_that_dies_leaves_the_old_one_or_the_new_one_at_its_path(
    ranks: Ranks, tmp_path: Path, rank: int
) -> None:
    """At no moment is neither loadable: `deaths` loads the path after every death."""
    *died, lived = attempts(ranks, tmp_path, "replace", rank)
    assert len(died) >= (12 if rank == 0 else 2)
    assert all(one["unusable"] == [] and one["chosen"] == 2 for one in (*died, lived))
    assert all(one["afterwards"] == ["step-00000002"] for one in (*died, lived))


@pytest.mark.slow
def test_a_pruning_that_dies_leaves_nothing_that_looks_complete_and_is_not(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = attempts(ranks, tmp_path, "prune", 0)
    assert len(found) > 5
    assert all(one["unusable"] == [] and one["chosen"] == 2 for one in found)
    assert all(one["afterwards"] == ["step-00000002"] for one in found)


@pytest.mark.parametrize(("verb", "rank"), only([("replace", 0)], [("save", 0), ("replace", 0), ("save", 1)]))
def test_a_save_to_object_storage_that_dies_half_way_loses_nothing(
    ranks: Ranks, tmp_path: Path, verb: str, rank: int
) -> None:
    """There no rename commits: a manifest that is cut while it is written over the old one is redone."""
    *died, lived = attempts(ranks, tmp_path, verb, rank, "local")
    assert len(died) >= (10 if rank == 0 else 2)
    assert all(one["unusable"] == [] for one in (*died, lived))
    kept = "step-00000003" if verb == "save" else "step-00000002"
    assert all(one["afterwards"] == [kept] for one in (*died, lived))


def test_a_planted_commit_without_a_second_copy_goes_red(ranks: Ranks, tmp_path: Path) -> None:
    """Nobody looks for the whole text beside a manifest that was cut."""
    with pytest.raises(RankError, match="CheckpointError"):
        attempts(ranks, tmp_path, "replace", 0, "local-planted")
