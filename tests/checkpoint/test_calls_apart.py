"""A rank that leaves a call is heard of by the others; what it does next is not taken for the same call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from shardwright import DTensor, Shard, distribute_tensor, init_device_mesh
from shardwright.checkpoint import agree, async_save, background, load, load_hf, read_manifest, save, save_hf
from shardwright.checkpoint.hugging_face import export
from shardwright.checkpoint.interrupts import Interrupts
from shardwright.errors import CheckpointError

Ranks = Callable[..., list[Any]]
FUNCTIONS = ("save", "dcp", "async", "hf", "load", "load hf")


class Leaves:
    """Anything with a state of its own; Ctrl-C comes on rank 1 while it is asked for that."""

    def __init__(self, how: BaseException | None) -> None:
        self.how = how

    def state_dict(self) -> dict[str, int]:
        if self.how is not None and dist.get_rank() == 1:
            raise self.how
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to take."""


class Model(nn.Linear):
    """Its state is asked for by exports and imports too."""

    def __init__(self, how: BaseException | None) -> None:
        super().__init__(2, 2)
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        self.how = how

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.how is not None and dist.get_rank() == 1:
            raise self.how
        return super().state_dict(*args, **kwargs)


def call(name: str, folder: Path, path: Path, how: BaseException | None) -> None:
    """One function of checkpoints, and all that it does."""
    loader, model = Leaves(how), Model(how)
    if name == "save":
        save(path, Model(None), loader=loader)
    elif name == "dcp":
        save(path, Model(None), loader=loader, format="dcp")
    elif name == "async":
        async_save(path, Model(None), loader=loader).wait()
    elif name == "hf":
        save_hf(model, path)
    elif name == "load":
        load(folder / "old", Model(None), loader=loader)
    else:
        load_hf(model, folder / "old hf")


def ways_it_ends(folder: Path) -> dict[str, str]:
    """What each function says where rank 1 is interrupted in it; it does its work when it is called again."""
    save(folder / "old", Model(None), loader=Leaves(None))
    save_hf(Model(None), folder / "old hf")
    said: dict[str, str] = {}
    for name in FUNCTIONS:
        for how in (KeyboardInterrupt(), SystemExit(3)):
            with pytest.raises((CheckpointError, type(how))) as error:
                call(name, folder, folder / name, how)
            said[f"{name}: {type(how).__name__}"] = f"{type(error.value).__name__}: {error.value}"
            dist.barrier()
            assert not (folder / name).exists() or not [*(folder / name).iterdir()]
            dist.barrier()  # before a rank goes on and saves
        call(name, folder, folder / name, None)
    return said


def test_an_interrupt_of_one_rank_is_heard_of_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """It told nobody: the others waited, and met its next save, of another step, in theirs."""
    first, other = ranks(2, ways_it_ends, tmp_path)
    for name, text in first.items():
        how = name.rpartition(" ")[2]
        assert f"failed on rank 1: {how}" in text, (name, text)
        assert text.startswith("ApartError"), (name, text)
        assert other[name].startswith(how), (name, other[name])


def interrupted_at(gather: int, function: Callable[[], object]) -> str:
    """How a call ends where Ctrl-C comes on rank 1 in its n-th gather; "" where it has no such."""
    count = 0
    truly = dist.all_gather_object

    def gathered(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count == gather and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGINT)
        truly(*args, **kwargs)

    with mock.patch.object(dist, "all_gather_object", gathered):
        try:
            function()
        except (CheckpointError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error}"
    return "done" if count >= gather else ""


def signals_between(folder: Path) -> dict[str, str]:
    """In a call that is not the last, so that ranks which are a call apart would meet in the next one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    save(folder / "old", Model(None), loader=Leaves(None))
    save_hf(Model(None), folder / "old hf")
    said: dict[str, str] = {}
    for name in FUNCTIONS:
        for gather in range(1, 6):
            path = folder / name / str(gather)
            said[f"{name} {gather}"] = interrupted_at(gather, partial(call, name, folder, path, None))
            dist.barrier()
        call(name, folder, folder / name / "after", None)
    return {name: text for name, text in said.items() if text}


def test_a_signal_amid_a_call_is_heard_of_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """The rank left the others in a collective, and gloo ended them when it sent something else.

    It raises where the others hear of it, or, from the moment on in which all is done, at the end.
    """
    first, other = ranks(2, signals_between, tmp_path, fresh=True)
    assert first.keys() == other.keys()
    assert {name.split()[0] for name in first} == {name.split()[0] for name in FUNCTIONS}
    for name, text in first.items():
        assert other[name].startswith("KeyboardInterrupt"), (name, other[name])
        assert text == "done" or "failed on rank 1: KeyboardInterrupt" in text, (name, text)
    heard = {"save 1", "dcp 1", "dcp 2", "hf 1", "load 1", "load hf 1"}
    assert {name for name, text in first.items() if text != "done"} == heard


def exports_apart(folder: Path) -> str:
    """Rank 1 leaves an export between two agreements, and goes on with its next one."""
    if dist.get_rank() == 1:
        with (
            mock.patch.object(export._Export, "stream", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            save_hf(Model(None), folder / "first")
    with pytest.raises(CheckpointError) as error:
        save_hf(Model(None), folder / ("next" if dist.get_rank() == 1 else "first"))
    save_hf(Model(None), folder / "after")
    return str(error.value)


def test_two_calls_are_never_taken_for_one(ranks: Ranks, tmp_path: Path) -> None:
    """What was said in both began with one word, so that ranks went on with the plan of another call."""
    for told in ranks(2, exports_apart, tmp_path, fresh=True):
        assert "in another call: rank 1 left its last one before its end" in told
    assert sorted(one.name for one in tmp_path.iterdir()) == ["after"]


def copies_apart(path: Path) -> list[str]:
    """Rank 1 is interrupted while it copies what the thread is to write; then all save again, twice."""
    said: list[str] = []
    leaves = KeyboardInterrupt if dist.get_rank() == 1 else None
    with mock.patch.object(background, "_copied", side_effect=leaves, wraps=background._copied):
        try:
            async_save(path, Model(None)).wait()
        except (CheckpointError, KeyboardInterrupt) as error:
            said.append(f"{type(error).__name__}: {error}")
    try:
        async_save(path, extra=1).wait()
    except CheckpointError as error:
        said.append(str(error))
    return [*said, str(async_save(path, extra=1).wait())]


def test_an_interrupted_copy_is_told_where_the_others_wait(ranks: Ranks, tmp_path: Path) -> None:
    """They waited in the thread for one that had left."""
    first, other = ranks(2, copies_apart, tmp_path / "c", fresh=True)
    assert other[0].startswith("KeyboardInterrupt")
    assert first[1] == other[1]
    for text in (first[0], first[1]):
        assert "copying the state failed on rank 1: KeyboardInterrupt" in text
    assert first[2] == other[2] == str(tmp_path / "c")


def steps_apart(folder: Path) -> list[str]:
    said = []
    mine = 10 + dist.get_rank()
    for call_it in (
        lambda: save(folder / "own", v=1, step=mine),
        lambda: save(folder / "dcp", v=1, step=mine, format="dcp"),
        lambda: async_save(folder / "async", v=1, step=mine),
    ):
        with pytest.raises(CheckpointError) as error:
            call_it()
        said.append(str(error.value))
    save(folder / "one says", v=1, step=7 if dist.get_rank() == 1 else None)
    return said


def test_ranks_at_other_steps_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """An interrupt before the call, or one that a loop caught, lets a rank come a step ahead."""
    for said in ranks(2, steps_apart, tmp_path):
        assert all("rank 0 saves step=10 and rank 1 step=11: their loops are apart" in one for one in said)
    assert [one.name for one in tmp_path.iterdir()] == ["one says"]
    assert read_manifest(tmp_path / "one says").world == 2


def test_a_rank_that_does_not_answer_is_told_of_in_words(tmp_path: Path) -> None:
    """The backend's own words are those of a broken connection, without what was done."""
    broken = RuntimeError("Connection reset by peer")
    with (
        mock.patch.object(agree, "world", return_value=2),
        mock.patch.object(dist, "all_gather_object", side_effect=broken),
        pytest.raises(agree.LostError, match=r"did not answer rank 0 amid preparing .*: Connection reset"),
    ):
        save(tmp_path / "c", v=1)
    save(tmp_path / "c", v=1)


def beside_a_death(path: Path, how: str) -> str:
    """A fork of this rank is the other one, and dies where both are in collectives of torch: what is said."""
    dist.destroy_process_group()
    rank = int(os.fork() == 0)
    limit = timedelta(seconds=10)
    dist.init_process_group("gloo", f"file://{path}.store", rank=rank, world_size=2, timeout=limit)
    mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None))
    try:
        if rank == 1:
            DTensor.full_tensor = dcp.save = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(agree.LostError) as error:
            save_hf(model, path) if how == "hf" else save(path, model, format="dcp")
    finally:
        if rank == 1:
            os._exit(1)
    return str(error.value)


@pytest.mark.parametrize("how", ["hf", "dcp"])
def test_a_rank_that_dies_amid_collectives_of_torch_is_told_of_in_words(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    """They were gathers of whole tensors, and torch's own save: what the backend said came through."""
    (said,) = ranks(1, beside_a_death, tmp_path / "c", how, fresh=True)
    assert "a rank did not answer rank 0 amid" in said
    assert f"{tmp_path / 'c'}" in said
    assert not [one for one in tmp_path.rglob("*") if not one.name.endswith(".store")]


def test_a_thread_that_goes_on_with_a_call_lets_no_signal_into_the_main_one() -> None:
    """A Ctrl-C came while `async_save` started its thread: the save went on, and nobody knew of it."""
    interrupts, came = Interrupts(), list[int]()
    inside, leave = threading.Event(), threading.Event()

    def goes_on() -> None:
        with interrupts.open():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=goes_on)
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        interrupts.hold()
        thread.start()
        assert inside.wait(30)
        signal.raise_signal(signal.SIGUSR1)
        held = list(came)
        interrupts.release()
    finally:
        signal.signal(signal.SIGUSR1, before)
        leave.set()
        thread.join()
    assert held == []
    assert came == [signal.SIGUSR1]


@pytest.mark.parametrize("amid", ["hold", "release"])
@pytest.mark.parametrize("comes", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_amid_the_change_of_handlers_leaves_the_programs_own(
    monkeypatch: pytest.MonkeyPatch, amid: str, comes: signal.Signals
) -> None:
    """What came after the first change and before the last one left the rest as they were amid a call."""
    numbers, interrupts, change = (signal.SIGUSR1, signal.SIGUSR2), Interrupts(), signal.signal
    before = {number: change(number, signal.default_int_handler) for number in numbers}

    def changed(number: int, handler: Any) -> Any:
        was = change(number, handler)
        if number == numbers[0]:
            monkeypatch.setattr(signal, "signal", change)
            signal.raise_signal(comes)
        return was

    def call() -> None:
        interrupts.hold()
        interrupts.release()

    try:
        if amid == "release":
            interrupts.hold()
        monkeypatch.setattr(signal, "signal", changed)
        with pytest.raises(KeyboardInterrupt):
            call() if amid == "hold" else interrupts.release()
        assert [signal.getsignal(number) for number in numbers] == [signal.default_int_handler] * 2
    finally:
        for number, handler in before.items():
            change(number, handler)


class Handles:
    """It sets a handler while its state is asked for, and will put back the one that it found."""

    def state_dict(self) -> dict[str, int]:
        self.before = signal.signal(signal.SIGUSR1, lambda *_: None)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing to take."""


def test_handlers_are_the_programs_own_after_a_call(tmp_path: Path) -> None:
    came: list[int] = []
    first = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        one = signal.getsignal(signal.SIGUSR1)
        save(tmp_path / "c", v=1)
        assert signal.getsignal(signal.SIGUSR1) is one
        within = Handles()
        save(tmp_path / "c", within=within)
        assert signal.getsignal(signal.SIGUSR1) is not one
        signal.signal(signal.SIGUSR1, within.before)
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, first)
