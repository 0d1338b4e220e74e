"""What the library communicated and decided, kept only while somebody looks.

The active recorders are one stack for the whole process, not a context variable: autograd runs backward
passes on threads of its own, and what they send must be seen too.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch

# Not resolved: code objects name files as they were imported, through a link if there is one.
_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_STANDARD = str(Path(threading.__file__).parent)

_active: tuple[Recorder, ...] = ()
_lock = threading.Lock()


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
        global _active  # noqa: PLW0603 - one stack per process is the point of this module
        with _lock:
            _active = (*_active, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active  # noqa: PLW0603
        with _lock:
            _active = tuple(recorder for recorder in _active if recorder is not self)


def recording() -> bool:
    """True while a recorder is active and the program is not being traced into a compiled graph."""
    return bool(_active) and not torch.compiler.is_compiling()


def record_collective(
    op: str, *, axis: str, bytes_sent: int, reason: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Note one collective; callers ask `recording()` first when the arguments cost something."""
    if not recording():
        return
    event = Event(op, axis, bytes_sent, reason, source_line(), tuple(shape), dtype)
    for recorder in _active:
        recorder.collectives.append(event)


def record_decision(op: str, reason: str, details: str = "") -> None:
    """Note one choice that the user did not spell out; `op` is what it was made for."""
    if not recording():
        return
    decision = Decision(op, reason, source_line(), details)
    for recorder in _active:
        recorder.decisions.append(decision)


def source_line() -> str:
    """`file:line` of the innermost frame outside this package, torch and the standard library ("" if none).

    In a backward pass on an engine thread there is none: the frames of the forward pass are gone.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_library(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_library(filename: str) -> bool:
    if filename.startswith((_PACKAGE, _TORCH, "<")):
        return True
    return filename.startswith(_STANDARD) and "site-packages" not in filename
