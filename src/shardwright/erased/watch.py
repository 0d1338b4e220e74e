"""What the program does on the host while it is recorded, that no operator shows.

The interpreter tells of each call: pieces of the user's code (their globals are looked at before they run),
and functions of C that look at the world (a clock, Python's random numbers, a file), at values of tensors, or
move a generator of torch. A replay would do none of it.
"""

from __future__ import annotations

import _io
import _queue
import contextlib
import datetime as dt
import dis
import importlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Self

import torch

from shardwright.comm.record import source_line
from shardwright.erased.catching import Catching
from shardwright.erased.owners import is_library
from shardwright.erased.refuse import Refusal
from shardwright.erased.walk import DRAWS, World

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
_HERE = str(Path(__file__).parent)
_BUILTIN = {
    "print": "it prints; a replay would not",
    "input": "it asks the user",
    "open": "it opens a file",
    "next": "it takes the next of an iterator; a replay would not",
    "globals": "it asks for a global by a name that nobody sees",
    "_getframe": "it asks for variables by names that nobody sees",
}
_CLOCK = "it reads the clock, which says something else in a replay"
_VALUES = frozenset({"tolist", "numpy", "__array__", "data_ptr"})
_HANDS_OUT = frozenset({"_to_dlpack", "_to_dlpack_versioned", "to_dlpack"})
_GENERATOR = frozenset({"set_state", "get_state", "manual_seed", "seed"})
_OF_THE_PROCESS = frozenset({"urandom", "getpid", "fspath", "getcwd", "cpu_count", "sched_getaffinity"})
_WRITES = frozenset({"write_record", "write_end_of_file", "write"})  # torch's own, and that of files
_READS_UNSEEN = frozenset({"tensor_split", "_pad_packed_sequence"})
_KNOWN = frozenset({"torch", "numpy", "shardwright", *sys.stdlib_module_names})
# Of the standard library, objects of C with a state that nobody watches.
_WITH_STATE = frozenset(
    {
        "_blake2", "_bz2", "_csv", "_hashlib", "_hmac", "_lzma", "_md5", "_multiprocessing", "_posixshmem",
        "_sha1", "_sha2", "_sha256", "_sha3", "_sha512", "_socket", "_sqlite3", "_ssl", "mmap", "select",
        "sqlite3", "zlib",
    }
)  # fmt: skip
_STATES = frozenset({"contextlib", "torch.random", "torch.cuda.random"})
_OF_STATES = torch.random.get_rng_state.__code__, torch.random.set_rng_state.__code__
_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
_ENVIRON = {id(getattr(f, "__code__", None)) for f in vars(type(os.environ)).values()}
# What `contextlib.contextmanager` makes of a generator, and goes on with it.
_MANAGER = contextlib._GeneratorContextManager
_MADE = _MANAGER.__init__.__code__
_GOES_ON = frozenset({id(_MANAGER.__enter__.__code__), id(_MANAGER.__exit__.__code__)})
_NAMES = frozenset({*_BUILTIN, *_VALUES, *_GENERATOR, "run_backward", "now", "today", "utcnow", "urandom"})


def profiled() -> str:
    """Why nothing can be watched, "" where it can."""
    given_back = sys.getprofile() is None or callable(sys.getprofile())
    return "" if given_back else "a profiler of C looks at each call, and could not be given its place back"


class Watch:
    """Within the block the program is looked at; nothing of what it does is changed.

    ran_backward: did a backward run inside? restored: refusals that fall where no random number is drawn.
    catching: told of codes that may take an error without being on the way of it.
    states: told of a state of the CPU's generator that a checkpoint of torch has `kept`, or puts back.
    """

    def __init__(
        self,
        world: World,
        values_read: Callable[[torch.Tensor, str], None],
        catching: Catching,
        states: Callable[..., None],
    ) -> None:
        self.world, self.values_read, self.catching, self.states = world, values_read, catching, states
        self.refusals: list[Refusal] = []
        self.restored: list[Refusal] = []
        self.ran_backward = False
        self._stopped = False
        self._whys: dict[tuple[str, type, str | None], str] = {}
        self._managers: dict[int, Any] = {}  # those of generators that the call has made
        # By `id` (a code computes its hash anew each time), and whether its calls and returns are told on.
        self._known: dict[int, tuple[CodeType, bool]] = {}

    def __enter__(self) -> Self:
        self._outer = sys.getprofile()
        self.world.drawn()  # what was drawn before is no part of the call
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._outer)
        self.catching.forget()
        self._managers.clear()
        self.refusals += self.world.drawn()

    def stop(self) -> None:
        """See nothing any more."""
        self._stopped = True
        sys.setprofile(self._outer)

    def _event(self, frame: FrameType, event: str, what: Any) -> None:
        if self._stopped:  # a pause that was going on has brought it back
            sys.setprofile(self._outer)
        elif event == "c_call":
            self._called(what, frame)
        elif event == "call" or event == "return":  # noqa: PLR1714 - asked millions of times: no tuple
            known = self._known.get(id(frame.f_code)) or self._meet(frame)
            if known[1]:
                self._tell(frame, event, what)

    def _tell(self, frame: FrameType, event: str, what: Any) -> None:
        if frame.f_code in _OF_STATES:
            kept = frame.f_code is _OF_STATES[0]
            if kept is (event == "return") and _by_checkpointing(frame):
                self.states(what if kept else frame.f_locals["new_state"], kept=kept)
        elif frame.f_code is _IMPORT:
            if event == "return" and not _is_no_part(frame.f_back):
                self.world.imported()
        elif frame.f_code is _MADE:
            made = frame.f_locals["self"]
            self._managers[id(made)] = made
        elif event == "call":
            self.catching.called(frame)
        else:
            self.catching.returned(frame)

    def _is_of_a_block(self, name: str, frame: FrameType) -> bool:
        """Does a generator of this very call go on, as a block begins or ends? A replay has what it does."""
        goes_on = name == "next" and id(frame.f_code) in _GOES_ON
        return goes_on and id(frame.f_locals["self"]) in self._managers

    def _meet(self, frame: FrameType) -> tuple[CodeType, bool]:
        """A code that was not met yet."""
        code = frame.f_code
        users = not is_library(code.co_filename, frame.f_globals)
        asks_environment = id(code) in _ENVIRON
        if (users and _is_no_part(frame)) or (asks_environment and not _by_the_user(frame)):
            return code, False  # the program may call it again
        if asks_environment:
            self.world.reach("os.environ", os.environ)
        ends_block = id(code) in self.world.exits or self.catching.is_exit(frame)
        told = (
            code is _MADE
            or code is _IMPORT
            or code in _OF_STATES
            or self.catching.looks_at(code, users=users, ends_block=ends_block)
        )
        known = self._known[id(code)] = code, told
        if users:
            self._met(code, frame)
        return known

    def _met(self, code: CodeType, frame: FrameType) -> None:
        """The user's code, for the first time."""
        if not self.world.finds(code) and self._holds_something(code, frame):
            why = "it is not found from the program, and nobody watches what it holds"
            self.refusals.append(Refusal(code.co_qualname, why, f"{code.co_filename}:{code.co_firstlineno}"))
        self.world.run_code(code, frame.f_globals)
        for instruction in dis.get_instructions(code):
            if instruction.opname in {"STORE_GLOBAL", "DELETE_GLOBAL"}:
                where = f"{code.co_filename}:{instruction.positions.lineno if instruction.positions else 0}"
                name = f"the global {instruction.argval!r}"
                self.refusals.append(Refusal(name, "it is assigned; a replay would not", where))
            elif instruction.opname == "LOAD_ATTR" and instruction.argval == "_version":
                where = f"{code.co_filename}:{instruction.positions.lineno if instruction.positions else 0}"
                self.refusals.append(Refusal("_version", "it counts writes, also of other calls", where))
            elif instruction.opname == "LOAD_GLOBAL" and instruction.argval not in frame.f_globals:
                self.world.absent(instruction.argval, frame.f_globals)

    def _why(self, name: str, owner: Any, module: str | None) -> str:
        """Why a function of C cannot be replayed, asked once of each."""
        key = name, owner if isinstance(owner, type) else type(owner), module
        if key not in self._whys:
            self._whys[key] = _why(*key)
        return self._whys[key]

    def _holds_something(self, code: CodeType, frame: FrameType) -> bool:
        """Is it a closure, or a method of a class that nobody has met?"""
        if {*code.co_freevars} - {"__class__"}:
            return True
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        return code.co_name != "__del__" and self.world.is_strange(first)  # of what is let go meanwhile

    def _called(self, function: Any, frame: FrameType) -> None:
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__self__", None)
        if name in _VALUES and isinstance(owner, torch.Tensor):
            self.values_read(owner, f"Tensor.{name}")
        elif name in _HANDS_OUT:
            self.refusals.append(Refusal(name, "it hands out memory that others may read", source_line()))
        elif name == "run_backward":
            self.ran_backward = True
        elif name in _GENERATOR and isinstance(owner, torch.Generator):  # whoever asks
            why = "it reads or moves the state of a generator of random numbers"
            found = self.restored if _by_checkpointing(frame) else self.refusals
            if found is self.refusals or frame.f_code not in _OF_STATES:  # of which it is told
                found.append(Refusal(f"Generator.{name}", why, source_line()))
        elif name in _READS_UNSEEN:
            why = "it may read sizes from a tensor, in memory that nobody watches"
            self.refusals.append(Refusal(name, why, source_line()))
        elif name in _WRITES and (name != "write" or _within(frame, "torch.serialization")):
            self.refusals.append(Refusal(name, "it writes a file", source_line()))
        else:
            why = self._why(name, owner, getattr(function, "__module__", None))
            if why and _by_the_user(frame) and not (_is_no_part(frame) or self._is_of_a_block(name, frame)):
                self.refusals.append(Refusal(name, why, source_line()))


class Pause:
    """Within the block nothing is watched but what goes through `watched`: what a recording does itself.

    From Python 3.12 on a profile hook that comes or goes costs more than what it is spared.
    """

    __slots__ = ("_hook",)

    def __enter__(self) -> Self:
        self._hook = sys.getprofile() if sys.version_info < (3, 12) else None
        if self._hook is not None:
            sys.setprofile(None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            sys.setprofile(self._hook)

    def watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result."""
        if self._hook is None:
            return func(*args, **kwargs)
        sys.setprofile(self._hook)
        try:
            return func(*args, **kwargs)
        finally:
            sys.setprofile(None)


def _why(name: str, owner: type, module: str | None) -> str:
    """Why a function of C cannot be replayed; "" where it can. owner: the class of which it is a method."""
    if name in _BUILTIN and module in {"builtins", "io", "_io", "sys"}:
        return _BUILTIN[name]
    if module == "time" or (name in _NAMES and (owner is dt.datetime or owner is dt.date)):
        return _CLOCK
    if issubclass(owner, random.Random) or (name == "urandom" and module == "posix"):
        return DRAWS
    if module == "posix" and name not in _OF_THE_PROCESS:
        return "it asks the file system, which may say something else in a replay"
    if module == "_thread" and name.startswith("start_"):
        return "it starts a thread, which a replay would not"
    if issubclass(owner, _queue.SimpleQueue):
        return "it hands something to another thread, or gets something from one"
    if issubclass(owner, _io._IOBase) and name in {"write", "writelines", "read", "readline"}:
        return "it reads or writes a file"
    library = _library_of(name, owner, module)
    if library not in _KNOWN or library in _WITH_STATE:
        return "a function of C, and nobody sees what it reads and writes"
    return ""


def _library_of(name: str, owner: type, module: str | None) -> str:
    """The library that a function of C is of; a class of Python's has the methods of one of C."""
    if module is None:
        made = (cls for cls in owner.__mro__ if not isinstance(vars(cls).get(name), FunctionType | None))
        module = next(made, owner).__module__
    return module.partition(".")[0]


def _within(frame: FrameType | None, module: str) -> bool:
    """Does this run inside a module's functions?"""
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator does, in Python perhaps: no part of the program, as a replay does it again."""
    return func(*args, **kwargs)


def _is_no_part(frame: FrameType | None) -> bool:
    """Does this run because something is imported for the first time, or inside an operator?"""
    while frame is not None:
        if frame.f_code is kernel.__code__ or frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        if frame.f_code.co_filename.startswith(_HERE):
            return False
        frame = frame.f_back
    return False


def _by_checkpointing(frame: FrameType | None) -> bool:
    """Does `torch.utils.checkpoint` ask? It puts the generators as they were, and back."""
    while frame is not None and frame.f_globals.get("__name__") in _STATES:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _by_the_user(frame: FrameType | None) -> bool:
    """The user's code, perhaps through the standard library (logging, say); not torch, not this package."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return False
        if not is_library(name, frame.f_globals):
            return True
        frame = frame.f_back
    return False
