"""Faults of object storage: each operation fails, saves of others stand there, a manifest is cut."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from shardwright.checkpoint import load, prune, save, step_path
from shardwright.checkpoint.storage.commit import Saving, finished
from shardwright.checkpoint.storage.folder_names import Content, Journal, look
from shardwright.checkpoint.storage.manifest import NAME, PREFIX
from shardwright.checkpoint.storage.owner import _since as began
from shardwright.checkpoint.storage.owner import this_process
from shardwright.checkpoint.storage.place import Address
from shardwright.checkpoint.storage.stores.of import store_of
from shardwright.errors import CheckpointError
from tests.checkpoint.faults import damage
from tests.checkpoint.faults.inject import Count

Verdicts = Iterator[tuple[str, str]]
CHANGING = ("pipe_file", "open", "rm_file")
READING = ("info", "ls", "cat_file", "isdir")
OTHER = "0123456789abcdef"


class StorageError(Exception):
    """What a client of some storage raises: no OSError."""


@contextlib.contextmanager
def _before_each(names: tuple[str, ...], act: Callable[[str], None]) -> Iterator[None]:
    """These operations of the memory file system do something first."""
    real = {name: getattr(MemoryFileSystem, name) for name in names}

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            act(name)
            return real[name](*args, **kwargs)

        return call

    for name in names:
        setattr(MemoryFileSystem, name, stand_in(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(MemoryFileSystem, name, function)


@contextlib.contextmanager
def failing(at: int, names: tuple[str, ...], *, lasting: bool) -> Iterator[Count]:
    """Operation number `at` (from 1) of the memory file system raises; 0: none."""
    count = Count()

    def act(name: str) -> None:
        count.done += 1
        if at and (count.done == at or (lasting and count.done > at)):
            count.failed = count.failed or name
            raise StorageError("503: slow down")

    with _before_each(names, act):
        yield count


@contextlib.contextmanager
def meanwhile(at: int, what: Callable[[], object]) -> Iterator[Count]:
    """Before operation number `at` of the memory file system something else is done."""
    count = Count()

    def act(name: str) -> None:
        count.done += 1
        if count.done == at:
            count.failed = name
            what()

    with _before_each((*CHANGING, *READING), act):
        yield count


def empty() -> str:
    """The address of a folder in a memory that holds nothing."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return "memory://run/c"


def names(path: str = "run/c") -> list[str]:
    """What is in the folder."""
    return sorted(one.rpartition("/")[2] for one in MemoryFileSystem.store if one.startswith(f"/{path}/"))


def errors(*, lasting: bool, over: bool) -> Verdicts:
    """One operation of a save fails: the old or the new checkpoint loads, the next save leaves no rest."""
    at, seen = 0, True
    while seen:
        at += 1
        path, text = empty(), ""
        if over:
            damage.saved(path)
        with failing(at, (*CHANGING, *READING), lasting=lasting) as count:
            try:
                damage.saved(path, 2.0)
            except CheckpointError as error:
                text = str(error)
        seen = bool(count.failed)
        name = f"storage error at {count.failed} {at}{', lasting' * lasting}"
        found = damage.outcome(path, (1.0, 2.0)) if over or not text else "right"
        yield name, "" if found == "right" and "\n" not in text else f"{text}; then {found}"
        damage.saved(path, 3.0)
        found = damage.outcome(path, (3.0,))
        left = {one.split("-")[0] for one in names()}
        yield f"{name}, saved again", "" if found == "right" else found
        yield f"{name}, nothing left", "" if left == {"data", "manifest.json"} else str(names())


def read_errors() -> Verdicts:
    """Each operation of a load fails: nothing changed, the place is named."""
    path = empty()
    damage.saved(path)
    at, seen = 0, True
    while seen:
        at += 1
        with failing(at, READING, lasting=False) as count:
            found = damage.outcome(path)
        seen = bool(count.failed)
        good = found == "right" or (path in found and not found.startswith("WRONG"))
        yield f"storage error at {count.failed} {at} of a load", "" if good else found


def cut_manifests(which: slice = slice(None)) -> Verdicts:
    """A commit that ends at any byte of its manifest: the old or the new checkpoint loads."""
    path = empty()
    damage.saved(path, 2.0)
    new = MemoryFileSystem.store["/run/c/manifest.json"].getvalue()
    data = dict(MemoryFileSystem.store)
    save_id = json.loads(new)["manifest"]["id"]
    for at in (*range(60), *range(60, len(new), 97), len(new) - 1)[which]:
        MemoryFileSystem.store.clear()
        damage.saved(path, 1.0)
        MemoryFileSystem.store.update(data)
        put(f"manifest-{save_id}.new", new)
        put("manifest.json", new[:at])
        put(f"saving-{save_id}.json", Journal(save_id, ()).text)
        found = damage.outcome(path, (2.0,))
        yield f"a manifest cut at byte {at}", "" if found == "right" else found
        damage.saved(path, 3.0)
        found = damage.outcome(path, (3.0,))
        yield f"a manifest cut at byte {at}, saved again", "" if found == "right" else found


def _stored(value: float) -> tuple[str, dict[str, bytes]]:
    """A checkpoint alone in its folder: the id of its save, and its objects."""
    damage.saved(empty(), value)
    found = {name: MemoryFileSystem.store[f"/run/c/{name}"].getvalue() for name in names()}
    return json.loads(found[NAME])["manifest"]["id"], found


def _cut(value: float, at: int, *, data: bool = True) -> tuple[str, dict[str, bytes]]:
    """A save whose manifest was cut at a byte, and stands whole beside it; `data`: with its files."""
    save_id, found = _stored(value)
    whole = found.pop(NAME)
    return whole[:at].decode(), {f"manifest-{save_id}.new": whole, **(found if data else {})}


def two_cut_manifests() -> Verdicts:
    """Two saves left their manifests, one of them was being written; or of one the files have gone since."""
    checksum_ends = len(PREFIX) + 32
    for at, data in [(at, True) for at in (checksum_ends, 400)] + [(at, False) for at in (0, 20, 60, 400)]:
        for _ in range(4):  # which name comes first is chance
            (_, other), (cut, mine) = _cut(1.0, at, data=data), _cut(2.0, at)
            path = empty()
            for name, content in (other | mine | {NAME: cut.encode()}).items():
                put(name, content)
            found = damage.outcome(path, (2.0,))
            yield f"two manifests, cut at byte {at}, data of both: {data}", "" if found == "right" else found
            saving = Saving(Address(path))
            saving.begin()
            saving.abandon()
            found = damage.outcome(path, (2.0,))
            yield f"the same, begun to save again, {at}, {data}", "" if found == "right" else found


def _finish(path: str) -> Content:
    store = store_of(Address(path))
    return finished(store, look(store))


def finished_by_another() -> Verdicts:
    """Before request `at` of one that finishes a cut commit, another machine finishes it."""
    at, seen = 0, True
    while seen:
        at += 1
        cut, mine = _cut(2.0, 400)
        path = empty()
        for name, content in (mine | {NAME: cut.encode()}).items():
            put(name, content)
        with meanwhile(at, partial(_finish, path)) as count:
            try:
                found = "" if _finish(path).manifest else "no manifest is seen"
            except (OSError, CheckpointError) as error:
                found = str(error)
        seen = bool(count.failed)
        yield f"another machine at {count.failed} {at}", found
        found = damage.outcome(path, (2.0,))
        yield f"another machine at {count.failed} {at}, loaded", "" if found == "right" else found


def put(name: str, data: bytes) -> None:
    """An object of the folder."""
    MemoryFileSystem().pipe_file(f"/run/c/{name}", data)


def others() -> Verdicts:
    """What another save left goes if that has provably ended; else it stays, named, and goes on request."""
    here = this_process()
    ended = replace(here, since="1")  # its pid is another process's by now
    parent = replace(here, pid=os.getppid(), since=began(os.getppid()))
    far = replace(here, host="elsewhere", boot="another")
    yield "of a process that has ended", _beside(Journal(OTHER, (), ended), "removed")
    yield "of this process, which saves no more", _beside(Journal(OTHER, (), here), "removed")
    yield "of another machine", _beside(Journal(OTHER, (), far), "kept")
    yield ("of a process that lives", _refused(Journal(OTHER, (), parent)))
    yield "without a journal", _beside(None, "removed")
    damage.saved(empty())
    put("thesis.txt", b"years of work")
    put("data-0123456789abcdef-00000-000.safetensors", b"not ours")
    damage.saved("memory://run/c", 2.0)
    kept = {"thesis.txt", "data-0123456789abcdef-00000-000.safetensors"} <= set(names())
    yield "of somebody else", "" if kept else "removed"


def _left(journal: Journal | None) -> str:
    """A checkpoint, and data of another save beside it that says that it is ours."""
    path = step_path("memory://run", 1)
    empty()
    save(path, damage.model(1.0))
    inside = "run/checkpoints/step-00000001"
    file = next(name for name in names(inside) if name.startswith("data"))
    data = MemoryFileSystem.store[f"/{inside}/{file}"].getvalue()
    own = file.split("-")[1]
    system = MemoryFileSystem()
    system.pipe_file(f"/{inside}/{file.replace(own, OTHER)}", data.replace(own.encode(), OTHER.encode()))
    if journal is not None:
        system.pipe_file(f"/{inside}/saving-{OTHER}.json", journal.text)
    return inside


def _beside(journal: Journal | None, wanted: str) -> str:
    inside = _left(journal)
    path = step_path("memory://run", 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save(path, damage.model(2.0))
    load(path, damage.model(-1.0))
    there = any(OTHER in name for name in names(inside))
    if there != (wanted == "kept") or bool(told) != there:
        return f"{names(inside)}, {[str(one.message) for one in told]}"
    prune("memory://run", keep=1, interrupted=True)
    return "still there" if any(OTHER in name for name in names(inside)) else ""


def _refused(journal: Journal) -> str:
    inside = _left(journal)
    before = names(inside)
    try:
        save(step_path("memory://run", 1), damage.model(2.0))
    except CheckpointError as error:
        return "" if "is being written" in str(error) and names(inside) == before else str(error)
    return "saved"
