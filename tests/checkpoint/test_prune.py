"""Pruning never removes what could still be needed, and nothing that is not this run's."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwright.checkpoint import latest, prune, save, step_path
from shardwright.checkpoint.storage.disk import unlock_folder
from shardwright.checkpoint.storage.folder_names import metadata
from shardwright.checkpoint.storage.stores.local import lock
from shardwright.checkpoint.storage.writer import header_of
from shardwright.train.run_folder import RunFolder
from tests.checkpoint.faults.inject import failing


def run_of(out: Path, *steps: int) -> Path:
    for step in steps:
        save(step_path(out, step), nn.Linear(2, 2), step=step)
    return out


def spoil(path: Path, how: str) -> None:
    manifest, data = path / "manifest.json", next(path.glob("data-*"))
    if how == "a stranger's":
        data.unlink()
        manifest.write_text('{"mine": 1}')
    else:
        cut = data if how == "short data" else manifest
        cut.write_bytes(cut.read_bytes()[:-40])


@pytest.mark.parametrize("how", ["short data", "short manifest", "a stranger's"])
def test_what_cannot_be_used_takes_no_place_of_what_can(tmp_path: Path, how: str) -> None:
    run = run_of(tmp_path, 1, 2, 3)
    spoil(step_path(run, 3), how)
    assert prune(run, keep=1) == (step_path(run, 1),)
    assert latest(run) == step_path(run, 2)


def test_a_strangers_folder_stays_and_stops_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2, 3)
    spoil(step_path(run, 2), "a stranger's")
    assert prune(run, keep=1) == (step_path(run, 1),)
    assert step_path(run, 2).exists()


def test_a_link_is_left_alone_and_does_not_count(tmp_path: Path) -> None:
    other, run = run_of(tmp_path / "other", 1), run_of(tmp_path / "run", 2, 3)
    step_path(run, 1).symlink_to(step_path(other, 1))
    step_path(run, 4).symlink_to(step_path(run, 3))
    assert prune(run, keep=1) == (step_path(run, 2),)
    assert latest(other) == step_path(other, 1)
    assert latest(run).resolve() == step_path(run, 3)


def test_a_folder_is_free_again_although_a_child_has_it_open(tmp_path: Path) -> None:
    handle = lock(tmp_path)
    inherited = os.dup(handle)  # as a fork leaves it
    unlock_folder(handle)
    os.close(lock(tmp_path))
    os.close(inherited)


def no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_it_warns_and_removes_what_manifests_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(step_path(tmp_path, step), nn.Linear(1, 1), step=step)
    other = "0123456789abcdef"
    stray = step_path(tmp_path, 1) / f"data-{other}-00000-000.safetensors"
    stray.write_bytes(header_of([], metadata(other)))  # of a save that may be under way
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="has no locks"):
        assert prune(tmp_path, keep=1) == (step_path(tmp_path, 1),)
    assert [one.name for one in step_path(tmp_path, 1).iterdir()] == [stray.name]
    assert latest(tmp_path) == step_path(tmp_path, 2)


def test_a_run_goes_on_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = RunFolder(tmp_path, writes=True)
    with pytest.warns(UserWarning, match="has no locks"):
        folder.lock()
    folder.close()


def test_a_disk_that_refuses_is_no_reason_to_end_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        save(step_path(tmp_path, step), nn.Linear(1, 1), step=step)
    with (
        failing(tmp_path, 1, errno.EIO, names=("rename",)),
        pytest.warns(UserWarning, match="step-00000001 was not removed"),
    ):
        assert prune(tmp_path, keep=1) == ()
    unfinished = step_path(tmp_path, 0)
    save(unfinished, nn.Linear(1, 1))
    (unfinished / "manifest.json").unlink()
    with (
        failing(unfinished, 1, errno.EIO, names=("unlink",)),
        pytest.warns(UserWarning, match="step-00000000 was not tidied up"),
    ):  # it is no reason to say that nothing was removed
        assert prune(tmp_path, keep=1) == (step_path(tmp_path, 1),)


def test_digits_of_other_scripts_are_no_step(tmp_path: Path) -> None:
    """A folder that no run of ours writes was taken for the newest, and removed."""
    for step in (99, 2):
        save(step_path(tmp_path, step), nn.Linear(2, 2), step=step)
    other = step_path(tmp_path, 99).parent / "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0669\u0669"
    step_path(tmp_path, 99).rename(other)
    assert latest(tmp_path) == step_path(tmp_path, 2)
    prune(tmp_path, keep=1)
    assert other.exists()
