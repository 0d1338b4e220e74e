"""A run that dies between any two file operations leaves a checkpoint that is complete, and says which."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from shardwright.checkpoint import save, save_hf
from shardwright.checkpoint.hugging_face.under_way import before_named, metadata
from shardwright.checkpoint.storage import disk
from shardwright.checkpoint.storage.folder_names import Journal
from shardwright.checkpoint.storage.owner import saves_here, this_process
from shardwright.checkpoint.storage.writer import header_of
from shardwright.errors import CheckpointError
from shardwright.testing.rank_errors import RankError
from tests.checkpoint.crash_program import deaths_of_exports
from tests.checkpoint.faults.inject import no_locks
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


EXPORTS = [(kind, rank, 2) for kind in ("dcp", "hf") for rank in (0, 1)] + [("hf", 0, 1), ("hf single", 0, 1)]


@pytest.mark.parametrize(("kind", "rank", "world"), only([("dcp", 0, 2), ("hf", 0, 1)], EXPORTS))
def test_an_export_that_dies_is_rolled_back_by_the_next_one(
    ranks: Ranks, tmp_path: Path, kind: str, rank: int, world: int
) -> None:
    *died, lived = ranks(1, deaths_of_exports, tmp_path, kind, rank, world, fresh=True, timeout=600)[0]
    assert len(died) >= (8 if rank == 0 else 2)
    assert [whole for _, whole, _ in died] == sorted(whole for _, whole, _ in died)
    assert not died[0][1]
    assert lived[1]
    assert all(names == lived[2] for _, _, names in died)
    assert not [name for name in lived[2] if "saving" in name or "/." in name.replace("/.metadata", "")]


def everything_below(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def plant(folder: Path) -> None:
    """What looks like an export that was interrupted, and of which nothing says that it is one."""
    save = "0123456789abcdef"
    journal = Journal(save, (), this_process()).text
    files = {
        f"hf/.model.safetensors.{save}": b"mine",
        f"named/saving-{save}.json": journal,
        "named/model-00001-of-00002.safetensors": header_of([], {"format": "pt"}),
        f".dcp.{save}/__0_0.distcp": b"mine",
        f".noted.{save}/saving-{save}.json": journal,
        f".noted.{save}/notes.txt": b"mine",
    }
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / f".linked.{save}").symlink_to(folder / "hf")


def test_what_no_journal_and_no_header_proves_stays(tmp_path: Path) -> None:
    plant(tmp_path)
    before = everything_below(tmp_path)
    for name in ("hf", "named"):
        with pytest.raises(CheckpointError, match=r"holds \.?model.*: name another folder, or remove it"):
            save_hf(nn.Linear(1, 1), tmp_path / name)
    for name in ("dcp", "noted", "linked"):
        with warnings.catch_warnings(action="ignore"):
            save(tmp_path / name, nn.Linear(1, 1), format="dcp")
    after = everything_below(tmp_path)
    assert {name for name, data in before.items() if after.get(name) != data} == {
        "named/saving-0123456789abcdef.json",
        ".noted.0123456789abcdef/saving-0123456789abcdef.json",
    }


def test_a_file_of_an_export_that_was_rolled_back_goes_by_its_header(tmp_path: Path) -> None:
    """A rank that had not heard of the end of rank 0 made it when the journal was gone."""
    save = "0123456789abcdef"
    late = tmp_path / before_named("model-00002-of-00003.safetensors", save)
    late.write_bytes(header_of([], metadata(save)))
    save_hf(nn.Linear(1, 1), tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.filterwarnings("ignore:this file system has no locks")
def test_without_locks_the_journal_of_an_export_says_that_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "lock_folder", no_locks)
    for number, since in ((1, "0"), (2, this_process().since)):
        save, folder = f"{number:016x}", tmp_path / str(number)
        folder.mkdir()
        saves_here.add(save)
        text = Journal(save, (), replace(this_process(), since=since)).text
        (folder / f"saving-{save}.json").write_bytes(text)
        for name in (f".model.safetensors.{save}", "model-00001-of-00002.safetensors"):
            (folder / name).write_bytes(header_of([], metadata(save)))
    save_hf(nn.Linear(1, 1), tmp_path / "1")
    assert [one.name for one in (tmp_path / "1").iterdir()] == ["model.safetensors"]
    before = everything_below(tmp_path / "2")
    with pytest.raises(CheckpointError, match=r"holds \.model\.safetensors\.0{15}2 already"):
        save_hf(nn.Linear(1, 1), tmp_path / "2")
    assert everything_below(tmp_path / "2") == before
    saves_here.discard(save)


@pytest.mark.filterwarnings("ignore:this file system has no locks")
def test_without_locks_an_export_keeps_the_journal_of_a_save_whose_data_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "lock_folder", no_locks)
    save = "0123456789abcdef"
    journal = Journal(save, (), replace(this_process(), since="0")).text
    (tmp_path / f"saving-{save}.json").write_bytes(journal)
    (tmp_path / f"data-{save}-00000-000.safetensors").write_bytes(header_of([], metadata(save)))
    before = everything_below(tmp_path)
    with pytest.raises(CheckpointError, match=f"holds data-{save}"):
        save_hf(nn.Linear(1, 1), tmp_path)
    assert everything_below(tmp_path) == before


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
