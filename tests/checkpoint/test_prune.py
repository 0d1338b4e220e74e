"""Pruning never removes what could still be needed, and nothing that is not this run's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from shardwright.checkpoint import latest, prune, save, step_path
from shardwright.checkpoint.storage.commit import lock
from shardwright.checkpoint.storage.disk import unlock_folder


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
