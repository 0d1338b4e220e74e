"""A load that has no memory of its own for what the system keeps: the same values, or nothing is changed."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import DTensor, Placement, Ragged, Shard, distribute_tensor
from shardwright.checkpoint import load, loading, save
from shardwright.checkpoint.storage import pages, reader, stream
from shardwright.checkpoint.storage.reader import Reader
from shardwright.errors import CheckpointError
from shardwright.testing import rank_mesh

Ranks = Callable[..., list[Any]]
ROWS, COLUMNS = 301, 700  # of which no cut begins where a chunk does


def whole(number: int) -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS) + number * 1_000_000


def plain(*, filled: bool) -> nn.Module:
    made = nn.Module()
    for number in range(3):
        value = whole(number) if filled else torch.zeros(ROWS, COLUMNS)
        made.register_parameter(f"p{number}", nn.Parameter(value))
    return made


def placed(placement: Placement, *, filled: bool) -> nn.Module:
    mesh, made = rank_mesh((2,), ("a",)), plain(filled=filled)
    for name, one in list(made.named_parameters()):
        setattr(made, name, nn.Parameter(distribute_tensor(one.detach(), mesh, [placement])))
    return made


def full(model: nn.Module) -> list[torch.Tensor]:
    found = [one.detach() for one in model.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


def is_right(model: nn.Module) -> bool:
    return all(torch.equal(one, whole(number)) for number, one in enumerate(full(model)))


def reload(path: Path, source: Placement, target: Placement) -> bool:
    save(path, placed(source, filled=True))
    model = placed(target, filled=False)
    load(path, model)
    return is_right(model)


@pytest.mark.parametrize("target", [Shard(0), Shard(1), Ragged((1, 3), dims=(0, 1))], ids=str)
def test_any_cut_of_what_is_held_is_the_cut_of_the_whole_tensor(
    ranks: Ranks, tmp_path: Path, target: Placement
) -> None:
    assert ranks(2, reload, tmp_path / "c", Shard(0), target) == [True, True]


def test_large_tensors_take_no_memory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the system keeps nothing for this user; then they do, and hold the same."""
    asked: list[int] = []
    monkeypatch.setattr(
        "shardwright.checkpoint.loading.room_for", lambda nbytes: asked.append(nbytes) or nbytes
    )
    save(tmp_path / "c", plain(filled=True))
    able, guard = pages._mlock(), pages._cut_short()
    held = able is not None and guard is not None and not able(0, 0)
    cases = ((able, guard, 0 if held else 3), (lambda *_: -1, guard, 3), (None, guard, 3), (able, None, 3))
    for lock, guarded, apart in cases:
        monkeypatch.setattr(pages, "_mlock", lambda lock=lock: lock)
        monkeypatch.setattr(pages, "_cut_short", lambda guarded=guarded: guarded)
        asked.clear()
        model = plain(filled=False)
        load(tmp_path / "c", model)
        assert is_right(model)
        assert len(asked) == apart


def test_neighbours_are_kept_as_one_between_large_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor alone began and ended within a large page, which then was 512 small ones."""
    if pages._cut_short() is None or pages._mlock() is None:
        pytest.skip("nothing is held: the extension was not built, or is turned off")
    size, asked = 30 << 20, list[tuple[int, int]]()
    (tmp_path / "f").touch()
    os.truncate(tmp_path / "f", size)
    handle = os.open(tmp_path / "f", os.O_RDONLY)
    mapped = pages.Pages(handle, size)
    os.close(handle)
    start, most = mapped._data.ctypes.data, 20 << 20

    def lock(address: int, nbytes: int) -> int:
        """As of a user who may keep 20 MiB."""
        fits = sum(n for _, n in asked) + nbytes <= most
        asked.extend([(address - start, nbytes)] if fits else [])
        return 0 if fits else -1

    monkeypatch.setattr(pages, "_mlock", lambda: lock)
    ends = [144, 3 << 20, 9 << 20, (17 << 20) + 5, size]
    neighbours = list(itertools.pairwise(ends))
    mapped.keep(reversed(neighbours))
    assert asked == [(0, 8 << 20), (8 << 20, 8 << 20)]
    held = [mapped.hold(low, high - low) for low, high in neighbours]
    assert [one is not None and len(one) for one in held] == [(3 << 20) - 144, 6 << 20, False, False]


@pytest.mark.parametrize("number", range(3))
def test_damage_of_what_is_held_is_named_and_nothing_is_changed(tmp_path: Path, number: int) -> None:
    save(tmp_path / "c", plain(filled=True))
    file = next((tmp_path / "c").glob("data-*"))
    data = bytearray(file.read_bytes())
    at = data.index(whole(number)[200].numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    model = plain(filled=False)
    with pytest.raises(CheckpointError, match=f"model/p{number} .*wrong checksum"):
        load(tmp_path / "c", model)
    assert not any(one.any() for one in full(model))


def test_a_file_that_is_cut_short_while_it_is_held_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that were held are gone then: to look at one would end the process."""
    save(tmp_path / "c", plain(filled=True))
    file, check = next((tmp_path / "c").glob("data-*")), Reader.check_held

    def cut_and_check(reader: Reader) -> None:
        os.truncate(file, 4096)
        check(reader)

    monkeypatch.setattr(Reader, "check_held", cut_and_check)
    model = plain(filled=False)
    with pytest.raises(CheckpointError, match=f"{file.name} it became shorter"):
        load(tmp_path / "c", model)
    assert not any(one.any() for one in full(model))


@pytest.mark.parametrize("amid", ["the check", "the copy"])
def test_a_file_that_is_cut_short_amid_a_load_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amid: str
) -> None:
    """A mapping whose file is shorter is a signal, which would end the process."""
    if pages._cut_short() is None or pages._mlock() is None:
        pytest.skip("nothing is held: the extension was not built, or is turned off")
    save(tmp_path / "c", plain(filled=True))
    file = next((tmp_path / "c").glob("data-*"))
    module, name = (reader, "first_wrong") if amid == "the check" else (loading, "fill")
    call = getattr(module, name)

    def cut_and_call(*args: Any) -> Any:
        os.truncate(file, 4096)
        return call(*args)

    monkeypatch.setattr(module, name, cut_and_call)
    model = plain(filled=False)
    with pytest.raises(CheckpointError, match="became shorter while it was read") as told:
        load(tmp_path / "c", model)
    if amid == "the check":
        assert not any(one.any() for one in full(model))
    else:
        assert "loaded in part" in str(told.value)


_OF_OTHERS = """
import mmap, os, sys, importlib.machinery as machinery
loader = machinery.ExtensionFileLoader("cut_short", sys.argv[1])
guard = loader.load_module()
file = open(sys.argv[2], "wb+")
file.truncate(3 * mmap.PAGESIZE)
watched, other = (mmap.mmap(file.fileno(), 3 * mmap.PAGESIZE, access=mmap.ACCESS_READ) for _ in range(2))
guard.watch(watched)
assert not guard.unwatch()
guard.watch(watched)
file.truncate(mmap.PAGESIZE)
assert not any(watched[:]) and guard.unwatch()
guard.watch(watched)
print("so far", flush=True)
other[2 * mmap.PAGESIZE]
"""


@pytest.mark.processes
def test_memory_of_others_that_is_cut_off_is_theirs(tmp_path: Path) -> None:
    """What is not watched ends the process, as ever."""
    if (guard := pages._cut_short()) is None:
        pytest.skip("the extension was not built, or is turned off")
    program = [sys.executable, "-W", "ignore", "-c", _OF_OTHERS, guard.__file__, str(tmp_path / "f")]
    found = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout, found.returncode) == ("so far\n", -signal.SIGBUS), found.stderr


def test_held_tensors_raise_the_version_that_autograd_asks_for(tmp_path: Path) -> None:
    save(tmp_path / "c", plain(filled=True))
    model = plain(filled=False)
    product = (model.p0 * model.p1).sum()
    load(tmp_path / "c", model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("way", ["extension", "pieces"])
def test_a_copy_of_memory_is_a_copy_wherever_it_begins_and_ends(way: str) -> None:
    if way == "extension" and stream._way() is stream.copy_in_pieces:
        pytest.skip("the extension was not built, or is turned off")
    copy = stream.copy_memory if way == "extension" else stream.copy_in_pieces
    source = bytes(range(251)) * 3
    for start in range(70):
        for size in (0, 1, 15, 63, 64, 65, 200, 300):
            target = bytearray(400)
            copy(memoryview(target)[start : start + size], memoryview(source)[7 : 7 + size])
            assert bytes(target) == bytes(start) + source[7 : 7 + size] + bytes(400 - start - size)
    for start, size in ((0, 1 << 16), (13, 100_003), (1031, 1 << 17)):
        target, long = bytearray(start + size + 7), source * 200
        copy(memoryview(target)[start : start + size], memoryview(long)[7 : 7 + size])
        assert bytes(target) == bytes(start) + long[7 : 7 + size] + bytes(7)
    with pytest.raises(ValueError, match=r"do not fit|different structures"):
        copy(memoryview(bytearray(3)), memoryview(b"four"))


def test_a_copy_takes_as_long_wherever_its_memory_lies() -> None:
    """Not five times as long where lines that are read and written lie alike in their pages."""
    size = 16 << 20
    source, target = (mmap.mmap(-1, size + mmap.PAGESIZE) for _ in range(2))
    source[:], target[:] = bytes(len(source)), bytes(len(target))

    def seconds(ahead: int) -> float:
        start = time.thread_time()
        stream.copy_memory(memoryview(target)[:size], memoryview(source)[ahead : ahead + size])
        return time.thread_time() - start

    alike, apart = ([seconds(ahead) for _ in range(7)] for ahead in (0, 1024))
    assert min(alike) < 2.5 * min(apart)
