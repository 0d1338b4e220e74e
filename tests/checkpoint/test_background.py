"""A save in the background holds what the state was when it was asked for, and fails on all ranks or none."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright import Shard, distribute_tensor, init_device_mesh
from shardwright.checkpoint import async_save, background, load, read_manifest, save
from shardwright.checkpoint.agree import Call
from shardwright.checkpoint.storage.arena import copy_bytes
from shardwright.errors import CheckpointError
from tests.programs import Program

_changed = threading.Event()
Ranks = Callable[..., list[Any]]


def placed(value: float) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Module()
    for name, placements in (("cut", [Shard(0)]), ("whole", None)):
        x = torch.arange(60.0).reshape(5, 12) * value
        model.register_parameter(name, nn.Parameter(distribute_tensor(x, mesh, placements)))
    return model


def change_while_saving(path: Path) -> list[bool]:
    """Save, then change every tensor at once; and once more, before the first is waited for."""
    model = placed(1.0)
    for number in range(3):
        saving = async_save(path.with_name(f"{path.name}{number}"), model, step=number)
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(2)
        _changed.set()
        dist.all_reduce(torch.ones(1))  # the run goes on, with its own collectives
    saving.wait()
    right = []
    for number in range(3):
        found = placed(-1.0)
        load(path.with_name(f"{path.name}{number}"), found)
        wanted = placed(2.0**number)
        pairs = zip(found.parameters(), wanted.parameters(), strict=True)
        right.append(all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs))
    return right


def test_it_holds_what_the_state_was(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, change_while_saving, tmp_path / "c") == [[True] * 3] * 2


def test_a_planted_save_that_copies_nothing_goes_red(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, without_copies, tmp_path / "c", fresh=True) != [[True] * 3] * 2


def without_copies(path: Path) -> list[bool]:
    """The thread waits until the state has been changed, so that it finds it so each time."""
    module = sys.modules["shardwright.checkpoint.job"]
    write = module.write_file

    def late(*args: Any) -> Any:
        assert _changed.wait(30)
        _changed.clear()
        return write(*args)

    background._copied, module.write_file = (lambda entries, _: list(entries)), late
    return change_while_saving(path)


def fail_on_one(path: Path) -> tuple[str, bool]:
    model = placed(1.0)
    saving = async_save(path, model)
    saving.wait()
    module, write = sys.modules["shardwright.checkpoint.job"], None
    if dist.get_rank() == 1:
        write, module.write_file = module.write_file, _full
    try:
        async_save(path, model).wait()
    except CheckpointError as error:
        module.write_file = write or module.write_file
        load(path, model)
        return str(error), async_save(path, model).wait() == path
    return "", False


def _full(*_: Any) -> None:
    raise OSError("the disk is full")


def test_a_failure_of_one_rank_is_told_to_all_where_they_wait(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, fail_on_one, tmp_path / "c", fresh=True)
    assert found[0] == found[1]
    assert "in the background failed: writing" in found[0][0]
    assert "failed on rank 1: OSError: the disk is full" in found[0][0]
    assert found[0][1]


def test_it_works_in_one_process(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    saving = async_save(tmp_path / "c", model, extra={"a": 1})
    assert saving.wait() == tmp_path / "c"
    assert saving.done
    assert load(tmp_path / "c", nn.Linear(2, 2)).extra == {"a": 1}


def test_what_cannot_be_saved_is_refused_before_it_returns(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="could only be pickled"):
        async_save(tmp_path / "c", nn.Linear(2, 2), extra=object())
    assert not (tmp_path / "c").exists()


def no_memory_on_one(path: Path) -> str:
    if dist.get_rank() == 1:
        background._copied = _no_memory
    with pytest.raises(CheckpointError) as error:
        async_save(path, placed(1.0)).wait()
    return str(error.value)


def _no_memory(*_: Any) -> None:
    raise MemoryError("no room for the copy")


def test_a_copy_that_fails_on_one_rank_is_told_to_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, no_memory_on_one, tmp_path / "c", fresh=True)
    assert found[0] == found[1]
    assert "copying the state failed on rank 1: MemoryError" in found[0]
    assert not (tmp_path / "c").exists()


def only_one_waits(path: Path) -> list[str]:
    """Rank 0 alone waits for a save that failed: what the next two calls say."""
    module = sys.modules["shardwright.checkpoint.job"]
    write, module.write_file = module.write_file, _full
    saving = async_save(path, placed(1.0))
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError):
            saving.wait()
    saving._thread.join()
    module.write_file = write
    with pytest.raises(CheckpointError) as error:
        async_save(path, placed(1.0))
    return [str(error.value), str(async_save(path, placed(1.0)).wait())]


def test_a_failure_that_one_rank_has_not_seen_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(2, only_one_waits, tmp_path / "c", fresh=True)
    assert found[0] == found[1]
    assert "the disk is full" in found[0][0]


def test_a_group_that_is_gone_is_no_world_of_one_rank() -> None:
    """A rank took itself for all, and committed what it had without that of the others."""
    assert not dist.is_initialized()
    with pytest.raises(CheckpointError, match="destroyed before the end of writing c: call `wait`"):
        Call().agreed("writing c", lambda: 1, group=object())


def test_the_memory_of_one_save_is_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it holds by then is on the disk; a much smaller state does not keep it."""
    large = nn.Linear(3000, 3000)
    places = []
    for number in range(2):
        nn.init.constant_(large.weight, number)
        async_save(tmp_path / f"{number}", large).wait()
        places.append(background._memory["last"])
        nn.init.constant_(large.weight, -1)
    assert places[0] is places[1]
    other = nn.Linear(3000, 3000)
    for number in range(2):
        load(tmp_path / f"{number}", other)
        assert (other.weight == number).all()
    monkeypatch.setattr(background, "_LITTLE", 0)
    async_save(tmp_path / "small", nn.Linear(2, 2)).wait()
    assert background._memory["last"] is not places[0]


@pytest.mark.parametrize("rows", [0, 3, 5000])
@pytest.mark.parametrize("how", ["plain", "transposed", "other type", "strided", "conjugate"])
def test_copied_bytes_are_the_elements(rows: int, how: str) -> None:
    x = torch.arange(rows * 300.0).reshape(rows, 300)
    source = {
        "transposed": x.reshape(300, rows).t(),
        "other type": x.double(),
        "strided": torch.stack([x, x], -1)[..., 1],
        "conjugate": torch.complex(x, x).conj(),
    }.get(how, x)
    target = torch.zeros(rows, 300, dtype=source.dtype if how == "conjugate" else torch.float32)
    before = target._version
    copy_bytes(target, source)
    assert torch.equal(target, source.to(target.dtype))
    assert target._version > before


def test_ctrl_c_where_a_save_is_waited_for_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread whose `join` was interrupted is dead to Python: the next `wait` returned before the commit."""
    job, goes_on = sys.modules["shardwright.checkpoint.job"], threading.Event()
    write = job.write_file

    def late(*args: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert goes_on.wait(30)
        return write(*args)

    monkeypatch.setattr(job, "write_file", late)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            async_save(tmp_path / "c", nn.Linear(2, 2)).wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    saving = background._under_way["last"]
    assert not saving.done
    threading.Timer(0.05, goes_on.set).start()
    assert saving.wait() == tmp_path / "c"
    assert (tmp_path / "c" / "manifest.json").exists()


def test_a_save_waits_for_the_one_of_this_process_to_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ctrl-C took the handle of was said to be another process's, and the save at the end refused."""
    job, goes_on = sys.modules["shardwright.checkpoint.job"], threading.Event()
    write = job.write_file
    monkeypatch.setattr(job, "write_file", lambda *args: goes_on.wait(30) and write(*args))
    lost = async_save(tmp_path / "c", nn.Linear(2, 2), step=1)
    threading.Timer(0.05, goes_on.set).start()
    save(tmp_path / "c", nn.Linear(2, 2), step=2)
    assert lost.done
    assert read_manifest(tmp_path / "c").step == 2
    assert not job.in_background


_UNHEARD = """
import sys
from shardwright.checkpoint import async_save, background
background.Job.finish = lambda *_: (_ for _ in ()).throw(OSError("the disk is full"))
async_save(sys.argv[1], extra=1)
"""


@pytest.mark.processes
def test_a_failure_that_nobody_waits_for_is_told_at_the_end(tmp_path: Path) -> None:
    told = Program(_UNHEARD, str(tmp_path / "c")).end()
    assert told.returncode == 0
    assert "nobody waited for it: the disk is full" in told.stderr


def waited_for_the_dead(path: Path) -> float:
    """A fork of this rank is the other one, and dies where the group is made; how long this one waits."""
    dist.destroy_process_group()
    rank = int(os.fork() == 0)
    limit = timedelta(seconds=2)
    dist.init_process_group("gloo", f"file://{path}.store", rank=rank, world_size=2, timeout=limit)
    if rank == 1:
        dist.new_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError):
            async_save(path, extra=1)
    finally:
        if rank == 1:
            os._exit(1)
    return time.monotonic() - began


def test_a_rank_that_dies_before_the_group_of_saves_is_made_is_not_waited_for(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The group was made with a limit of its own, of half an hour."""
    assert ranks(1, waited_for_the_dead, tmp_path / "c", fresh=True)[0] < 20


def test_two_threads_that_save_at_once_have_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async_save(tmp_path / "before", torch.zeros(1000)).wait()
    both, copied = threading.Barrier(2, timeout=30), background._copied

    def together(entries: Any, memory: Any) -> Any:
        found = copied(entries, memory)
        both.wait()
        return found

    monkeypatch.setattr(background, "_copied", together)
    values = (1.0, 2.0)
    threads = [
        threading.Thread(target=lambda v=v: async_save(tmp_path / str(v), torch.full((1000,), v)).wait())
        for v in values
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in values:
        found = torch.zeros(1000)
        load(tmp_path / str(value), found)
        assert torch.equal(found, torch.full((1000,), value))
