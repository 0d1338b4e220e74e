"""Checkpoints at addresses of fsspec: as in folders, with no rename and no lock.

`local://` is fsspec's file system on a disk, which several processes see; `memory://` is of one process.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from shardwright import Replicate, Shard, distribute_tensor, init_device_mesh
from shardwright.checkpoint import (
    async_save,
    convert,
    diff,
    latest,
    list_checkpoints,
    load,
    load_hf,
    prune,
    save,
    save_hf,
    step_path,
    verify,
)
from shardwright.checkpoint.storage import commit
from shardwright.checkpoint.storage.place import Address
from shardwright.checkpoint.storage.stores.objects import ObjectStore
from shardwright.cli import main
from shardwright.errors import CheckpointError
from tests.checkpoint.faults import damage, objects
from tests.checkpoint.test_faults import none_wrong
from tests.tiers import all_but, only

Ranks = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def _an_empty_memory() -> Iterator[None]:
    yield
    objects.empty()


@pytest.fixture(params=["memory", "local", "file"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    below = f"{tmp_path}/run" if request.param != "memory" else f"/{uuid.uuid4().hex}"
    return f"{request.param}://{below}"


def test_every_verb_takes_an_address(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        damage.saved(step_path(run, step), float(step))  # type: ignore[arg-type]
    model = damage.model(4.0)
    path = async_save(step_path(run, 4), model, damage.optimizer(model), extra={"value": 4.0}).wait()
    assert str(latest(run)) == str(path) == str(step_path(run, 4))
    assert damage.outcome(path, (4.0,)) == "right"  # type: ignore[arg-type]
    damage.saved(path, 5.0)  # type: ignore[arg-type]
    assert damage.outcome(path, (5.0,)) == "right"  # type: ignore[arg-type]
    assert verify(path) > 0
    assert [one.path for one in diff(path, step_path(run, 3)) if "bias" in one.path]
    assert [one.name for one in list_checkpoints(run).committed] == [f"step-0000000{n}" for n in (4, 3, 2, 1)]
    assert [one.name for one in prune(run, keep=2)] == ["step-00000002", "step-00000001"]
    for words in (["ls", run], ["show", str(path)], ["verify", str(path)], ["prune", run, "--keep", "1"]):
        assert main(["checkpoint", *words]) == 0
    assert "removed step-00000003" in capsys.readouterr().out
    assert [one.name for one in list_checkpoints(run).committed] == ["step-00000004"]


def test_torchs_file_is_converted_to_an_address(run: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", f"{run}/ours")
    other = nn.Linear(3, 2)
    load(f"{run}/ours", other)
    assert torch.equal(other.weight, model.weight)


def cut(path: str, rows: int, placement: Any) -> nn.Module:
    """A module with one parameter on a mesh of all ranks; its values are its indices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("a",))
    model = nn.Module()
    whole = torch.arange(rows * 1000.0).reshape(rows, 1000)
    model.register_parameter("w", nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    return model


def save_cut(path: str) -> None:
    save(path, cut(path, 700, Shard(0)), step=dist.get_world_size())


def load_cut(path: str) -> tuple[bool, int, int]:
    """Whether each element is right, the bytes that this rank read, and in how many requests."""
    model = cut(path, 700, Shard(0))
    with torch.no_grad():
        model.w.zero_()  # type: ignore[operator, union-attr]
    requests = 0
    real = LocalFileSystem.cat_file

    def counted(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal requests
        requests += name.endswith(".safetensors")
        return real(self, name, *args, **kwargs)

    LocalFileSystem.cat_file = counted
    read = load(path, model).bytes_read
    LocalFileSystem.cat_file = real
    whole = model.w.full_tensor()  # type: ignore[operator, union-attr]
    return torch.equal(whole, torch.arange(700_000.0).reshape(700, 1000)), read, requests


def test_ranks_save_and_load_their_parts_in_few_requests(ranks: Ranks, tmp_path: Path) -> None:
    path = f"local://{tmp_path}/c"
    ranks(2, save_cut, path, fresh=True)
    for world in (2, 3):
        found = ranks(world, load_cut, path, fresh=True)
        assert all(right for right, _, _ in found)
        part = 700_000 * 4 // world
        assert all(read < part + 2 * 4 * (1 << 18) and requests <= 6 for _, read, requests in found)


def refused_on_ranks(path: str) -> str:
    try:
        save(path, cut(path, 4, Replicate()))
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_memory_of_one_process_is_none_of_two(ranks: Ranks) -> None:
    found = ranks(2, refused_on_ranks, "memory://c", fresh=True)
    assert found[0] == found[1]
    assert "rank 1 does not see memory://c, which rank 0 made" in found[0]


def test_a_large_tensor_is_read_in_ranges_of_eight_mebibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(5_000_000.0)
    save("memory://c", weights=whole)
    ranges: list[int] = []
    real = MemoryFileSystem.cat_file

    def counted(self: Any, name: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        if name.endswith(".safetensors"):
            ranges.append(end - start)
        return real(self, name, start, end, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    found = torch.zeros_like(whole)
    load("memory://c", weights=found)
    assert torch.equal(found, whole)
    assert sum(ranges) <= whole.nbytes + 4096
    assert len(ranges) <= 5


@pytest.mark.parametrize(
    ("over", "lasting"), all_but([(True, True), (False, False)], product([False, True], repeat=2))
)
def test_an_error_of_the_storage_costs_this_save_only(over: bool, lasting: bool) -> None:
    none_wrong(objects.errors(lasting=lasting, over=over), 30)


def test_an_error_of_the_storage_in_a_load_changes_nothing() -> None:
    none_wrong(objects.read_errors(), 5)


@pytest.mark.parametrize("part", only([0], range(4)))
def test_a_manifest_that_is_cut_while_it_is_written_is_redone(part: int) -> None:
    none_wrong(objects.cut_manifests(slice(part, None, 4)), 25)


def test_of_two_cut_commits_the_one_counts_that_was_being_written() -> None:
    none_wrong(objects.two_cut_manifests(), 48)


def test_two_machines_finish_one_cut_commit() -> None:
    """At each request of the one the other does all of it: neither fails, and the new checkpoint is there."""
    none_wrong(objects.finished_by_another(), 8)


def test_what_another_save_left_goes_only_if_it_has_provably_ended() -> None:
    none_wrong(objects.others(), 6)


def test_a_planted_save_that_trusts_every_journal_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a save that is under way would be removed."""
    monkeypatch.setattr("shardwright.checkpoint.storage.owner.Owner.ended", lambda *_: True)
    assert any(why for _, why in objects.others())


def test_a_planted_commit_without_a_second_copy_goes_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "finished", lambda _, content: content)
    monkeypatch.setattr("shardwright.checkpoint.storage.manifest.cut_short", lambda *_: False)
    assert any(why for _, why in objects.cut_manifests())


def test_a_listing_that_lags_behind_loses_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not show the manifest yet, and its files were removed as those of a save that had failed."""
    real = MemoryFileSystem.ls

    def late(self: Any, path: str, **kwargs: Any) -> Any:
        return [one for one in real(self, path, **kwargs) if not one["name"].endswith("/manifest.json")]

    monkeypatch.setattr(MemoryFileSystem, "ls", late)
    path = objects.empty()
    damage.saved(path, 1.0)
    assert damage.outcome(path, (1.0,)) == "right"
    commit.Saving(Address(path)).abandon()
    assert damage.outcome(path, (1.0,)) == "right"
    damage.saved(path, 2.0)
    assert damage.outcome(path, (2.0,)) == "right"
    monkeypatch.setattr(ObjectStore, "has", lambda self, name: name != "manifest.json")  # nor does this
    damage.saved(objects.empty(), 3.0)
    monkeypatch.undo()
    assert damage.outcome(path, (3.0,)) == "right"


def test_where_nothing_may_be_removed_a_save_is_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest was whole under its name, and the save said that it had failed."""

    def refused(*_: object) -> None:
        raise PermissionError(13, "Access denied")

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refused)
    path = objects.empty()
    damage.saved(path, 1.0)
    assert damage.outcome(path, (1.0,)) == "right"


def test_a_save_that_goes_on_is_never_seen_as_a_checkpoint(tmp_path: Path) -> None:
    run = f"local://{tmp_path}"
    saving = commit.Saving(step_path(run, 1))
    saving.begin()
    assert not list_checkpoints(run).committed
    with pytest.raises(CheckpointError, match="never finished"):
        latest(run)
    saving.abandon()
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere://bucket/run", "Protocol not known: nowhere"),
        (Path("s3://bucket/run"), "was made a Path"),
        ("file://host/run", "three slashes"),
        ("s3:/bucket/run", "is no address"),
    ],
)
def test_an_address_that_cannot_be_reached_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(1, 1)
    calls = [lambda: save(path, model), lambda: load(path, model), lambda: latest(path), lambda: verify(path)]
    for call in calls:
        with pytest.raises(CheckpointError, match=why):
            call()
    assert not list(tmp_path.iterdir())


def test_files_of_other_programs_stay_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, path = nn.Linear(1, 1), "memory://x"
    calls = [
        lambda: save(path, model, format="dcp"),
        lambda: save_hf(model, path),
        lambda: load_hf(model, path),
        lambda: convert(path, tmp_path / "new"),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="is an address"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["memory://", "memory:///", "s3://"])
def test_an_address_without_a_folder_is_refused(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="names no folder"):
        save(where, extra=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["memory://b/x::y", "simplecache::memory://b/x", "zip://a::file:///b"])
def test_file_systems_on_top_of_each_other_are_refused(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="on top of each other"):
        save(where, extra=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run#1", "run?x=1", "run 1", "a::b"])
def test_a_folder_of_any_name_is_that_folder(name: str, tmp_path: Path) -> None:
    save((tmp_path / name).as_uri(), extra=1)
    save(tmp_path / "run", extra=2)
    assert load(tmp_path / name).extra == 1
    if "::" not in name:
        assert load(f"file://{tmp_path}/{name}").extra == 1


def test_a_checkpoint_that_cannot_be_asked_for_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"memory://{uuid.uuid4()}"
    for step in (1, 2):
        save(step_path(run, step), extra=step)
    asked = MemoryFileSystem.info

    def info(self: Any, path: str, **more: Any) -> Any:
        if "00000002" in path:
            raise TimeoutError("no answer")
        return asked(self, path, **more)

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    assert latest(run).name == "step-00000001"
    monkeypatch.setattr(MemoryFileSystem, "isdir", info)
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *_, **__: info(None, "00000002"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        latest(run)
