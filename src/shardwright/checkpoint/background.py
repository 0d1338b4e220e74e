"""Save while the run goes on: what this rank writes is copied, and a thread does the rest."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.agree import Call, Group, answered, rank, warn_without_group, world
from shardwright.checkpoint.collector import no_collection
from shardwright.checkpoint.job import Job, in_background, prepared
from shardwright.checkpoint.save import State
from shardwright.checkpoint.state import given
from shardwright.checkpoint.storage.arena import Arena, copy_bytes, room_for
from shardwright.checkpoint.storage.element_types import DTYPES
from shardwright.checkpoint.storage.place import Place
from shardwright.checkpoint.storage.writer import Entry
from shardwright.compat import foreach_copy_
from shardwright.errors import CheckpointError, words_of
from shardwright.remember import memo

# Of each world its group for saves in the background: a collective of the run never meets one of theirs.
_groups: weakref.WeakKeyDictionary[Any, Any] = memo(
    "groups of saves in the background", weakref.WeakKeyDictionary()
)
# What the last save copied to: one save is under way at a time, so the next one can have it.
_memory: dict[str, Arena] = memo("memory of saves in the background", {})
_LITTLE = 64 << 20
_UNTOLD = timedelta(minutes=5)  # what a store waits that has not been told
_SMALL = 1 << 16  # bytes of what is copied in one call, for the calls cost more than the bytes
_under_way: dict[str, AsyncSave] = memo("saves under way", {})


class _Outcome:
    """How a save ended, and whether anybody has heard of it."""

    def __init__(self, path: Place) -> None:
        self.path = path
        self.error: BaseException | None = None
        self.heard = False


def _tell_unheard(outcome: _Outcome) -> None:
    """Say what nobody waits for: the program ended, or let go of the save."""
    if outcome.error is not None and not outcome.heard:
        sys.stderr.write(
            f"shardwright: the save to {outcome.path} in the background failed, and nobody waited for it: "
            f"{outcome.error}\n"
        )


class AsyncSave:
    """A save that goes on in the background. It counts when `wait` has returned, not before."""

    def __init__(self, job: Job, stack: contextlib.ExitStack, group: Group, memory: dict[str, Arena]) -> None:
        self.path = job.path
        self._job, self._stack, self._group, self._taken = job, stack, group, memory
        self._outcome = _Outcome(job.path)
        weakref.finalize(self, _tell_unheard, self._outcome)  # at the latest when the process ends
        # Not `join`: one that an interrupt leaves takes a thread that runs for one that has ended.
        self._ended = in_background[job.path] = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"saving {job.path}")
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._stack:
                self._job.finish(self._group)
        except BaseException as error:  # noqa: BLE001  it is told where `wait` is called
            self._outcome.error = error
        finally:
            self._job.let_go()  # the copies go as soon as they are written
            _memory.update(self._taken)
            in_background.pop(self.path, None)
            self._ended.set()

    @property
    def waited_for(self) -> bool:
        """Whether `wait` has returned or raised."""
        return self._outcome.heard

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; what `wait` does then takes no time."""
        return self._ended.is_set()

    def wait(self) -> Place:
        """Wait until the checkpoint is committed; its path.

        Raises: CheckpointError: it is not: the same on every rank, and what was at the path is as it was.
        """
        self._ended.wait()
        self._outcome.heard = True
        if self._outcome.error is not None:
            raise CheckpointError(f"the save to {self.path} in the background failed: {self._outcome.error}")
        return self.path


def async_save(
    path: Place | str,
    model: State | None = None,
    optimizer: State | None = None,
    *,
    extra: Any = None,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
    **state: Any,
) -> AsyncSave:
    """As `save`, but return as soon as what this rank writes is copied; a thread writes and commits it.

    A collective. The state may change as soon as this returns. One save is under way at a time: this waits
    for the one before, and raises, on every rank, what that one raised if a rank has not waited for it.

    Returns: the save; call its `wait` on every rank before you rely on the checkpoint, and at the end.
    Raises: CheckpointError: as `save`, for what is found before anything is copied; a copy that fails is told
    by `wait`.
    Cost: stalls for one small gather and one copy of what this rank writes, and for a gather of descriptions
    where they are not those of a save before; memory for that copy, which is kept for the next save
    (`shardwright.testing.forget()` frees it). Communicates on a process group of its own, which the first
    call makes.
    """
    everything = given(model, optimizer) | state
    warn_without_group(path)
    with Call() as call, contextlib.ExitStack() as stack, no_collection():
        job = stack.enter_context(prepared(call, path, everything, extra, step, config, _finish_last))
        group, taken = _group(), _taken()
        interrupt = _copy(job, taken)
        saving = _under_way["last"] = AsyncSave(job, stack.pop_all(), group, taken)
    if interrupt is not None:
        raise interrupt
    return saving


def _finish_last() -> None:
    last = _under_way.pop("last", None)
    if last is not None and not last.waited_for:
        last.wait()


def _taken() -> dict[str, Arena]:
    """The memory of the save before, which nobody else has from here on: threads may save at once."""
    taken: dict[str, Arena] = {}
    with contextlib.suppress(KeyError):
        taken["last"] = _memory.pop("last")
    return taken


def _copy(job: Job, memory: dict[str, Arena]) -> BaseException | None:
    """Copy what this rank writes. Where that fails on one rank, all hear of it where they wait.

    Returns: the interrupt (Ctrl-C, an exit) with which this rank goes on.
    """
    try:
        job.copied = _copied(job.entries(), memory)
    except BaseException as error:  # noqa: BLE001  the others go on to the collectives of the thread
        job.failure = CheckpointError(f"copying the state failed on rank {rank()}: {words_of(error)}")
        return None if isinstance(error, Exception) else error
    return None


def _copied(entries: list[Entry], memory: dict[str, Arena]) -> list[Entry]:
    """The entries with tensors of their own, on the CPU, in the memory of the save before if that is enough.

    New memory is filled with zeros by the system first, which takes as long as the copy.
    """
    nbytes = sum(room_for(entry.nbytes) for entry in entries)
    views = [entry.view for entry in entries]
    pinned = any(one.device.type == "cuda" for one in views)
    arena = memory.get("last")
    if arena is None or arena.pinned != pinned or not nbytes <= arena.nbytes <= 2 * nbytes + _LITTLE:
        memory.clear()
        arena = memory["last"] = Arena(nbytes, pinned=pinned)
    arena.start_anew()
    copies = [
        Entry(one.key, one.dtype, one.cell, one.whole, arena.take(one.cell[1], DTYPES[one.dtype]))
        for one in entries
    ]
    with torch.no_grad():
        _copy_all([copy.view for copy in copies], views)
    return copies


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    small = []
    for pair in zip(targets, sources, strict=True):
        if pair[1].device.type == "cuda":
            pair[0].copy_(pair[1], non_blocking=True)  # one after another, and no wait between them
        elif pair[1].nbytes <= _SMALL:
            small.append(pair)
        else:
            copy_bytes(*pair)
    if small:
        foreach_copy_([target for target, _ in small], [source for _, source in small])
    for device in {one.device for one in sources if one.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _group() -> Group:
    if world() == 1:
        return None
    default: Any = dist.group.WORLD
    if default not in _groups:
        with answered("making the group of saves in the background"):
            _groups[default] = dist.new_group(backend="gloo", timeout=_limit(default))
    return _groups[default]


def _limit(group: Any) -> timedelta | None:
    """How long a group waits for a rank that does not come, as `init_process_group` was told.

    It tells the store, which tells us; of a store that the program made, nobody may have told it. None:
    torch's own limit for a new group, half an hour.
    """
    limit: timedelta = group.get_group_store().timeout
    return None if limit == _UNTOLD else limit
