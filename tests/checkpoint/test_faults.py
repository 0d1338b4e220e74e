"""Whatever happens to the files, the new or the old checkpoint loads, or the damage is named.

A part of `python -m tests.checkpoint.faults`, which tries far more.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwright.checkpoint import save, save_hf, verify
from shardwright.checkpoint.hugging_face.under_way import UnderWay
from shardwright.checkpoint.storage import disk, reader
from shardwright.checkpoint.storage.stores.local import LocalFile, LocalHold, LocalStore, NewLocalFile, lock
from shardwright.errors import CheckpointError
from tests.checkpoint.faults import sweep
from tests.checkpoint.faults.inject import CHANGING, failing
from tests.tiers import only


def none_wrong(verdicts: Iterable[tuple[str, str]], least: int) -> None:
    found = list(verdicts)
    assert len(found) >= least
    assert not [one for one in found if one[1]]


def test_flipped_bits_are_found_and_named(tmp_path: Path) -> None:
    none_wrong(sweep.flips(tmp_path, 60), 60)


def test_files_that_are_cut_missing_swapped_stale_or_linked_are_named(tmp_path: Path) -> None:
    none_wrong(sweep.files(tmp_path), 25)


@pytest.mark.parametrize(
    ("code", "lasting", "over"),
    only(
        [(errno.EIO, False, True)],
        [(c, lasting, over) for c in (errno.EIO, errno.ENOSPC) for lasting in (0, 1) for over in (0, 1)],
    ),
)
def test_a_disk_error_at_any_operation_of_a_save_costs_this_save_only(
    tmp_path: Path, code: int, lasting: bool, over: bool
) -> None:
    none_wrong(sweep.errors(tmp_path / "run", code, lasting=lasting, over=over), 30)


def write_ours(model: nn.Module, path: Path) -> None:
    save(path, model)


def write_hf(model: nn.Module, path: Path) -> None:
    save_hf(model, path, max_shard_size=100)


def write_dcp(model: nn.Module, path: Path) -> None:
    save(path, model, format="dcp")


@pytest.mark.parametrize("write", [write_ours, write_hf, write_dcp])
def test_an_interrupt_at_any_operation_stands_in_no_later_ones_way(
    tmp_path: Path, write: Callable[[nn.Module, Path], None]
) -> None:
    """A lock that was just taken stayed with the process, and files of a half export with the folder."""
    path, at, seen = tmp_path / "c", 0, True
    names = (*CHANGING, "stat", "fstat", "listdir")
    while seen:
        at += 1
        shutil.rmtree(path, ignore_errors=True)
        with failing(tmp_path, at, 0, names=names) as count:
            try:
                write(nn.Linear(9, 9), path)
            except (KeyboardInterrupt, CheckpointError):  # torch makes an error of it
                held = lock(path) if path.exists() else None
                if held is not None:
                    disk.unlock_folder(held)
                done = (path / ".metadata", path / "model.safetensors.index.json")
                if not any(one.exists() for one in done):
                    write(nn.Linear(9, 9), path)
        seen = bool(count.failed)
    assert at > 10


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (UnderWay, "__init__"),
        (UnderWay, "begin"),
        (LocalHold, "__init__"),
        (LocalFile, "__init__"),
        (NewLocalFile, "__init__"),
    ],
)
def test_an_interrupt_before_anybody_knows_of_what_was_opened_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """A journal of an export, with the lock of its folder; descriptors of a `verify`."""
    save(tmp_path / "old", nn.Linear(2, 2))
    calls = (lambda: save_hf(nn.Linear(2, 2), tmp_path / "c"), lambda: verify(tmp_path / "old"))
    call, real = calls[owner is LocalFile], getattr(owner, method)
    call = partial(save, tmp_path / "c", nn.Linear(2, 2)) if owner is NewLocalFile else call

    def interrupted(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise KeyboardInterrupt

    before = len([*Path("/proc/self/fd").iterdir()])
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert not (tmp_path / "c").exists() or not [*(tmp_path / "c").iterdir()]
    call()


def test_a_child_that_forgets_a_lock_leaves_it_to_its_parent(tmp_path: Path) -> None:
    """What a child of the process has is a copy of the open folder, whose lock is one for both."""
    hold = LocalStore(tmp_path).hold_there()
    of_child = LocalHold(tmp_path, os.dup(hold._handle), alone=True, made=False)
    del of_child
    assert disk.lock_folder(tmp_path) is None
    hold.let_go()


def test_an_interrupt_in_a_lock_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knew of a lock that was just taken; one that was being let go was held by the open folder."""
    lock_it, held = fcntl.flock, disk.lock_folder(tmp_path)
    assert held is not None

    def interrupted(handle: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            lock_it(handle, how)
        raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disk.unlock_folder(held)
    with pytest.raises(KeyboardInterrupt):
        disk.lock_folder(tmp_path)
    monkeypatch.undo()
    held = disk.lock_folder(tmp_path)
    assert held is not None
    disk.unlock_folder(held)


def test_a_disk_error_at_any_operation_of_a_load_changes_nothing(tmp_path: Path) -> None:
    none_wrong(sweep.read_errors(tmp_path), 5)


def test_a_folder_made_to_harm_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    none_wrong(sweep.hostile_folders(tmp_path), 150)


def test_what_is_not_provably_ours_is_never_deleted(tmp_path: Path) -> None:
    none_wrong(sweep.strangers(tmp_path), 6)
    none_wrong(sweep.beside(tmp_path), 1)


def test_a_planted_reader_that_checks_no_sum_goes_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "first_wrong", lambda *_: -1)
    assert any(why for _, why in sweep.flips(tmp_path, 20))


def test_a_planted_manifest_without_a_proof_goes_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["shardwright.checkpoint.storage.proof"], "prove", lambda manifest: None)
    assert any(why for _, why in sweep.hostile_folders(tmp_path))
