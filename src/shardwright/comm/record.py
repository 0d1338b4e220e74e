"""What was communicated and decided, kept only while somebody looks.

What the library sends it records itself, with axis and reason. What reaches a process group from anybody
else (torch's DTensor, `fully_shard`, a compiled graph, the program) is recorded from the tap of the groups.
The active recorders are one stack for the whole process, not a context variable: autograd runs backward
passes on threads of its own, and what they send must be seen too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from shardwright.comm.tap import GroupCall, listen, stop_listening

# Not resolved: code objects name files as they were imported, through a link if there is one.
_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = str(Path(threading.__file__).parent)

# Between the program and a process group: they hand a call on and do not want it.
_HANDS_ON = (
    "torch._library",
    "torch._ops",
    "torch.distributed._functional_collectives",
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
    "torch.library",
)
_BELOW = frozenset(f"shardwright.{name}" for name in ("comm.guard", "comm.record", "comm.tap", "compat"))
_PACKAGE_NAME = "shardwright"

# Is anybody recording, in some thread? To look at it is no call; `recording()` is the answer for this thread.
on = False

_active: tuple[Recorder, ...] = ()
_alone = 0  # blocks of `only_to`
_lock = threading.Lock()


class _Thread(threading.local):
    """own: inside a call that the library has recorded itself. reason: why what follows is sent.

    only: who alone hears of what this thread does.
    """

    own = 0
    reason = ""
    only: tuple[Recorder, ...] = ()


_thread = _Thread()


@dataclass(frozen=True, slots=True)
class Event:
    """One collective that this rank took part in. `bytes_sent` counts what leaves this rank for its peers."""

    op: str
    axis: str
    bytes_sent: int
    reason: str
    source_line: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice that the user did not spell out: an implicit redistribution, a fallback, a cast."""

    op: str
    reason: str
    source_line: str
    details: str = ""


@dataclass(eq=False)
class Recorder:
    """Collects events and decisions of every thread between `__enter__` and `__exit__`; recorders nest."""

    collectives: list[Event] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent to other ranks."""
        return sum(event.bytes_sent for event in self.collectives)

    def __enter__(self) -> Self:
        global _active, on
        with _lock:
            if not _active:
                listen(_record_others)
            _active, on = (*_active, self), True
        return self

    def __exit__(self, *_: object) -> None:
        global _active, on  # noqa: PLW0603
        with _lock:
            _active = tuple(recorder for recorder in _active if recorder is not self)
            on = bool(_active or _alone)
            if not _active:
                stop_listening(_record_others)


def recording() -> bool:
    """True while a recorder is active and the program is not being traced into a compiled graph."""
    return bool(_active or _thread.only) and not torch.compiler.is_compiling()


@contextmanager
def only_to(recorder: Recorder) -> Iterator[None]:
    """Tell this recorder, and nobody else, what this thread does in the block: it does not really happen."""
    outer, _thread.only = _thread.only, (recorder,)
    _count_alone(1)
    try:
        yield
    finally:
        _thread.only = outer
        _count_alone(-1)


def _count_alone(more: int) -> None:
    global _alone, on  # noqa: PLW0603
    with _lock:
        _alone += more
        on = bool(_active or _alone)


def record_collective(
    op: str, *, axis: str, bytes_sent: int, reason: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Note one collective; callers ask `recording()` first when the arguments cost something."""
    if not recording():
        return
    event = Event(op, axis, bytes_sent, reason, source_line(), tuple(shape), dtype)
    for recorder in _thread.only or _active:
        recorder.collectives.append(event)


class Sending:
    """A block that makes calls of process groups, which are one event: what `record_collective` takes."""

    def __init__(self, op: str, **facts: Any) -> None:
        self._op, self._facts = op, facts

    def __enter__(self) -> None:
        record_collective(self._op, **self._facts)
        _thread.own += 1

    def __exit__(self, *_: object) -> None:
        _thread.own -= 1


@contextmanager
def because(reason: str) -> Iterator[None]:
    """Why `torch.distributed` is called in this block, for the record."""
    outer, _thread.reason = _thread.reason, reason
    try:
        yield
    finally:
        _thread.reason = outer


def _record_others(call: GroupCall) -> None:
    """What a process group was asked to do by anybody but this library's own recorded calls."""
    if _thread.own:
        return
    tensors = call.tensors
    event = Event(
        call.op,
        call.axis,
        call.bytes_sent,
        _thread.reason or asker(),
        source_line(),
        tuple(tensors[0].shape) if len(tensors) == 1 else (sum(x.numel() for x in tensors),),
        tensors[0].dtype if tensors else torch.uint8,
    )
    for recorder in _active:
        recorder.collectives.append(event)


def asker() -> str:
    """Which part of torch asked for it, or that the program did."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_filename.startswith("<eval_with_key>") or module.startswith("torch._inductor"):
            return "a compiled graph"
        if not of_library(frame.f_code.co_filename):
            return "the program itself"
        if module.startswith(("torch", _PACKAGE_NAME)) and not (
            module.startswith(_HANDS_ON) or module in _BELOW
        ):
            return module
        frame = frame.f_back
    return "torch"


def record_decision(op: str, reason: str, details: str = "") -> None:
    """Note one choice that the user did not spell out; `op` is what it was made for."""
    if not recording():
        return
    decision = Decision(op, reason, source_line(), details)
    for recorder in _thread.only or _active:
        recorder.decisions.append(decision)


def source_line() -> str:
    """`file:line` of the innermost frame outside this package, torch and the standard library ("" if none).

    In a backward pass on an engine thread there is none: the frames of the forward pass are gone.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not of_library(name) and not frame.f_globals.get("__name__", "").startswith("torch._inductor"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def of_library(filename: str) -> bool:
    """Is this code of torch, of this package or of the standard library?"""
    if filename.startswith((_PACKAGE, _TORCH, "<")):
        return True
    return filename.startswith(_STANDARD) and "site-packages" not in filename
