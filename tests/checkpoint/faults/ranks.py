"""Faults of one rank or process among several: killed, failing, alone on its disk, or a second writer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import async_save, load, save
from shardwright.errors import CheckpointError
from tests.checkpoint.crash_program import deaths
from tests.checkpoint.faults import damage

Verdicts = Iterator[tuple[str, str]]
Ranks = Callable[..., list[Any]]
SOON = 5.0  # seconds until all ranks have heard of what one met


def attempts(ranks: Ranks, folder: Path, verb: str, rank: int, storage: str = "") -> list[dict[str, Any]]:
    """One attempt for each file operation of the rank, and a last one in which it lived."""
    found: list[dict[str, Any]] = ranks(1, deaths, folder, verb, rank, storage, fresh=True, timeout=3600)[0]
    return found


def kills(ranks: Ranks, folder: Path) -> Verdicts:
    """SIGKILL of one rank (and so of all) before each file operation; `deaths` loads what is left."""
    for storage in ("", "local"):
        for verb in ("save", "replace"):
            for rank in (0, 1):
                below = folder / f"{storage}{verb}{rank}"
                for number, one in enumerate(attempts(ranks, below, verb, rank, storage), 1):
                    name = f"rank {rank}, operation {number} of a {verb} {storage}".rstrip()
                    kept = "step-00000003" if verb == "save" else "step-00000002"
                    good = one["unusable"] == [] and one["afterwards"] == [kept]
                    yield name, "" if good else str(one)


def own_disks(ranks: Ranks, folder: Path) -> Verdicts:
    """Each rank has a folder that only it sees."""
    for exists in (False, True):
        found = ranks(2, save_on_own_disk, folder / str(exists), exists)
        named = len(set(found)) == 1 and "do not share this file system" in found[0]
        left = list(folder.rglob("data-*"))
        yield f"folders of one node, there before: {exists}", "" if named and not left else f"{found} {left}"


def save_on_own_disk(folder: Path, exists: bool) -> str:
    """What a rank is told."""
    own = folder / f"node{dist.get_rank()}" / "c"
    if exists:
        own.mkdir(parents=True, exist_ok=True)
    try:
        save(own, nn.BatchNorm1d(2))
    except CheckpointError as error:
        return re.sub(r"node\d", "node", str(error))
    return "saved"


def failures(ranks: Ranks, folder: Path) -> Verdicts:
    """Rank 1 fails somewhere: all raise within five seconds, with the same words, and can go on at once."""
    for what in ("describe", "write", "copy", "read", "user"):
        found = ranks(2, fail_on_one, folder / what, what, fresh=True, timeout=600)
        texts, waits = {text for text, _, _ in found}, [seconds for _, seconds, _ in found]
        told = len(texts) == 1 and "rank 1" in min(texts)
        good = told and max(waits) < SOON and all(again for _, _, again in found)
        yield f"rank 1 fails to {what}", "" if good else str(found)


class Stubborn:
    """User code that fails on one rank."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("not here")


def fail_on_one(path: Path, what: str) -> tuple[str, float, bool]:
    """What a rank is told, how long after the failure of the other one, and whether it can save again."""
    from shardwright.checkpoint import background, job, loading

    path.parent.mkdir(parents=True, exist_ok=True)
    model, user = damage.model(1.0), Stubborn()
    save(path, model, user=user)
    places = {
        "describe": (job, "collect"),
        "write": (job, "write_file"),
        "copy": (background, "_copied"),
        "read": (loading.Reader, "read"),
    }
    verbs = {"read": load, "user": load, "copy": lambda *a, **k: async_save(*a, **k).wait()}
    real = [(*place, getattr(*place)) for name, place in places.items() if name == what]
    if dist.get_rank() == 1:
        for owner, name, _ in real:
            setattr(owner, name, _fail)
    dist.barrier()
    start, text = time.monotonic(), ""
    try:
        verbs.get(what, save)(path, model, user=user)
    except CheckpointError as error:
        text = str(error)
    took = time.monotonic() - start
    for owner, name, function in real:
        setattr(owner, name, function)
    save(path, model, user=user)
    return text, took, load(path, model).bytes_read > 0


def _fail(*_: Any) -> None:
    raise OSError("the disk is gone")


def two_writers(folder: Path, rounds: int = 12) -> Verdicts:
    """Two processes save to one path: one of them, or both in turn; what is there is one save, whole.

    Forked, so this process must have no threads.
    """
    folder.mkdir(parents=True)
    pids = [_writer(folder / "c", 10.0 * (1 + number), rounds) for number in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    wanted = tuple(10.0 * (1 + number) + turn for number in range(2) for turn in range(rounds))
    found = damage.outcome(folder / "c", wanted)
    left = sorted({one.name.split("-")[0] for one in (folder / "c").iterdir()})
    yield "two writers, each told or done", "" if codes == [0, 0] else str(codes)
    yield "two writers, one save whole", "" if found == "right" else found
    yield "two writers, nothing left", "" if left == ["data", "manifest.json"] else str(left)


def _writer(path: Path, value: float, rounds: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for turn in range(rounds):
            try:
                damage.saved(path, value + turn)
            except CheckpointError as error:
                if "is being written" not in str(error):
                    raise
        code = 0
    finally:
        os._exit(code)
