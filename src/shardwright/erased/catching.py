"""Where the program would catch the error of an operator, and go on otherwise: a replay raises it.

What an operator is given in a replay may be what it refuses (an index out of range, a matrix that has no
inverse). So no operator that may raise by it is recorded where a handler of the user's may take the error:
in a frame between the operator and the erased function, in a generator that waits inside of such a handler
(what `contextlib.contextmanager` makes), or in an `__exit__` that may swallow it. Handlers of torch, of this
package and of the standard library are taken for what they are: they hand on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType

from shardwright.erased.handlers import (
    Clause,
    Handlers,
    handlers_at,
    matches_any,
    may_catch,
    may_swallow,
    yields_of,
)
from shardwright.erased.owners import is_library
from shardwright.erased.walk import EXITS

_ENTRANCES = __file__.replace("catching.py", "attempt.py")
_WHY = "an operator may raise by what it is given, and the program catches errors"
_GENERATORS = 0x20 | 0x80 | 0x200  # flags of a code: generator, coroutine, asynchronous generator
_SUPPRESS = contextlib.suppress.__exit__.__code__
_CONTEXTS = contextlib.__file__  # stacks and decorators there run the program's own blocks
_STACKS = (contextlib.ExitStack.__exit__.__code__, contextlib.AsyncExitStack.__aexit__.__code__)
_WITHOUT_OTHERS = frozenset({"aten", "prims", "shardwright", "_c10d_functional"})


class Catching:
    """What stands around the operators of one recording. refuse: told of what and why, and of the place."""

    def __init__(self, refuse: Callable[[str, str, str], None]) -> None:
        self._refuse = refuse
        self._thread = threading.get_ident()
        self._handlers: dict[tuple[int, int], Handlers] = {}
        self._libraries: dict[str, bool] = {}
        self._held: dict[int, CodeType] = {}  # so that nothing takes its `id`
        self._waits: dict[int, dict[int, Handlers]] = {}  # of codes, by `id`: where they wait in a handler
        self._waiting: dict[int, FrameType] = {}
        self._in_with: set[int] = set()  # frames, by `id`, under whose `with` blocks an operator ran
        self._refused: set[str] = set()

    # -- operators ------------------------------------------------------------------------------------

    def ran(self, namespace: str) -> None:
        """An operator that may raise ran here: who would catch its error?"""
        of_any = namespace not in _WITHOUT_OTHERS
        frame: FrameType | None = sys._getframe(1)
        if not self._below(frame, of_any):  # on a thread of autograd, for which the caller's waits
            self._below(sys._current_frames().get(self._thread), of_any)
        for waiting in self._waiting.values():
            self._judge(waiting, self._waits[id(waiting.f_code)][waiting.f_lasti], of_any)

    def _below(self, frame: FrameType | None, of_any: bool) -> bool:
        """Judge each frame down to the erased function; is it there?"""
        while frame is not None and frame.f_code.co_filename != _ENTRANCES:
            if not self._is_library(frame) or frame.f_code.co_filename == _CONTEXTS:
                self._judge(frame, self._handlers_of(frame), of_any)
            frame = frame.f_back
        return frame is not None

    def _is_library(self, frame: FrameType) -> bool:
        """Asked of each frame at each operator: remembered, by the file."""
        name = frame.f_code.co_filename
        if name not in self._libraries:
            found = is_library(name, frame.f_globals)
            if name[0:1] == "<":  # of many
                return found
            self._libraries[name] = found
        return self._libraries[name]

    def _handlers_of(self, frame: FrameType) -> Handlers:
        key = id(frame.f_code), frame.f_lasti
        if key not in self._handlers:
            self._held[key[0]] = frame.f_code
            self._handlers[key] = handlers_at(frame.f_code, frame.f_lasti)
        return self._handlers[key]

    def _judge(self, frame: FrameType, handlers: Handlers, of_any: bool) -> None:
        if handlers.with_block:
            self._in_with.add(id(frame))
        if any(_catches(clause, frame, of_any) for clause in handlers.clauses):
            self._refuse_at(frame)

    def _refuse_at(self, frame: FrameType) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if where not in self._refused:
            self._refused.add(where)
            self._refuse("an error", _WHY, where)

    def forget(self) -> None:
        """The program has ended: what waits still is not thrown into."""
        self._waiting.clear()
        self._in_with.clear()

    # -- what the watch sees --------------------------------------------------------------------------

    def looks_at(self, code: CodeType, *, users: bool, ends_block: bool) -> bool:
        """Is this a code whose calls and returns are to be told? One that may catch without being there."""
        if users and code.co_flags & _GENERATORS:
            waits = {place: found for place, found in yields_of(code).items() if found != Handlers()}
            if waits:
                self._waits[id(code)] = waits
            return bool(waits)
        return code is _SUPPRESS or (users and ends_block and may_swallow(code))

    @staticmethod
    def is_exit(frame: FrameType) -> bool:
        """Does it end a block by its name, or because somebody has pushed it on an `ExitStack`?"""
        caller = frame.f_back
        return frame.f_code.co_name in EXITS or (caller is not None and caller.f_code in _STACKS)

    def called(self, frame: FrameType) -> None:
        """A generator goes on, or an `__exit__` begins that may swallow what was raised under it."""
        self._waiting.pop(id(frame), None)
        if id(frame.f_code) in self._waits or not _may_match(frame):
            return
        caller = frame.f_back
        while caller is not None and id(caller) not in self._in_with:
            caller = caller.f_back if caller.f_code.co_filename == _CONTEXTS else None
        if caller is not None:
            self._refuse_at(caller)

    def returned(self, frame: FrameType) -> None:
        """A generator waits, perhaps for an error of what goes on outside of it."""
        if frame.f_lasti in self._waits.get(id(frame.f_code), ()):
            self._waiting[id(frame)] = frame


def _catches(clause: Clause, frame: FrameType, of_any: bool) -> bool:
    return may_catch(clause, frame.f_globals, frame.f_builtins, of_any=of_any)


def _may_match(frame: FrameType) -> bool:
    """May the errors that an `__exit__` swallows be those of operators? `suppress` says which they are."""
    return frame.f_code is not _SUPPRESS or matches_any(frame.f_locals["self"]._exceptions)
