"""What the program reaches in Python: scalars, containers, modules, optimizers and tensors, each by its path.

The walk begins at the function and goes where its code can go: cells, globals that its code names, the object
it is bound to, and what these hold. Each thing that was looked at is a `Fact`: a place, and what was there.
A recording holds as long as its facts do, and what a call changes among them is seen by comparing before and
after.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import inspect
import itertools
import logging
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.optim.lr_scheduler import LRScheduler

from shardwright.erased.facts import Fact, answers_itself, content, each_of, is_built_in, item_of, length_of
from shardwright.erased.held_by_c import CACHE, answers_of, is_weak, referent_of
from shardwright.erased.owners import (
    OF_PYTHON,
    STANDARD,
    is_library,
    is_of_a_library,
    is_the_users,
    module_of,
)
from shardwright.erased.refuse import Refusal

SCALARS = (
    bool, int, float, complex, str, bytes, type(None), np.number, np.bool_,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_PLAIN = frozenset(SCALARS)
_OF_MODULES = frozenset(nn.Module().__dict__)
_KEPT_OF_MODULES = (
    "training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks",
    "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_HOOKS_OF_OPTIMIZERS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_OF_OPTIMIZERS = ("param_groups", "state", "defaults", *_HOOKS_OF_OPTIMIZERS)
_OF_THE_PROCESS = frozenset({"logging", "threading"})  # what they hold leads to all that there is
_OF_C = frozenset({"builtins", "operator"})  # what their objects hold is what the program gave them
_OF_LOGGERS = (logging.Logger, logging.Manager)  # parents, whose level is theirs
EXITS = frozenset({"__exit__", "__aexit__"})
_STATE_OF_SCHEDULERS = {"last_epoch", "_last_lr", "_step_count", "base_lrs", "state_dict"}
_TOLD_BY_SCHEDULERS = frozenset({"get_last_lr", "get_lr", *_STATE_OF_SCHEDULERS})
# Values of a class that are looked at: not what makes attributes (functions, properties, other descriptors).
_VALUES = (*SCALARS, torch.Tensor, list, dict, tuple, set)
_UNWATCHED = (threading.local, ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_METHODS = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
_SLOT = types.MemberDescriptorType
_RUNNING = (types.FrameType, types.TracebackType, types.ModuleType)  # what leads to all that there is
_BEHIND = ("fget", "fset", "fdel", "__func__", "func")  # the functions of a method
_ABOUT_GRADIENTS = frozenset({"grad", "getattr", "backward", "zero_grad"})
_MOST = 50_000
_LARGEST_ARRAY = 4096
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_NUMPYS = "numpy.random", np.random.mtrand._rand, b""
DRAWS = "Python draws a random number; a replay would not"
# Of all modules and of all optimizers.
HOOKS = {
    name: hooks
    for module in (nn.modules.module, sys.modules[torch.optim.Optimizer.__module__])
    for name, hooks in vars(module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
}
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_UNSET = object()  # what a context variable holds that nobody has set


@dataclass(slots=True, eq=False)
class World:
    """All that was found.

    met: told of each tensor, once, before the code that reached it runs.
    sees_gradients: can the program ask which gradients exist? By an optimizer, or by their name.
    optimizers: those that it reaches. named: the names and texts in the program's own code.
    schedulers: those of learning rates, and their counts. Their state is no fact: it changes between calls.
    exits: codes of `__exit__`, whatever their name, by `id`.
    """

    met: Callable[[str, torch.Tensor], None]
    facts: list[Fact] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    sees_gradients: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    schedulers: list[tuple[str, LRScheduler, int | None]] = field(default_factory=list)
    exits: set[int] = field(default_factory=set)
    generators: list[tuple[str, Any, bytes]] = field(default_factory=lambda: [_NUMPYS])
    caches: list[tuple[str, Any, list[Any]]] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)
    _weak: set[int] = field(default_factory=set)  # by `id`, what only weak references led to
    _classes: dict[int, type] = field(default_factory=dict)
    _codes: set[tuple[int, Any]] = field(default_factory=set)
    _found: set[int] = field(default_factory=set)  # codes, and those inside them, by `id`
    _methods: dict[int, list[tuple[str, types.FunctionType]]] = field(default_factory=dict)
    _python_modules: list[tuple[str, types.ModuleType]] = field(default_factory=list)
    _names: list[set[str]] = field(default_factory=list)  # of each code that runs
    _importable: dict[str, None] = field(default_factory=dict)  # what may be names of modules
    _todo: list[tuple[str, Any]] = field(default_factory=list)

    def reach(self, path: str, value: Any) -> None:
        """Look at a value and at all that it holds."""
        self._todo.append((path, value))
        while self._todo:
            self._visit(*self._todo.pop())

    def holds(self, value: Any) -> bool:
        """Was this object met?"""
        return id(value) in self._seen

    def run_code(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        """The globals that a piece of code names, before it runs."""
        self._code(code, globals_)
        self.reach("what it names", None)

    def _code(self, code: types.CodeType, globals_: dict[str, Any]) -> None:
        key = id(code), id(globals_)
        if key in self._codes:
            return
        self._codes.add(key)
        self._seen[id(code)] = code  # held, so that nothing takes its `id`
        name, codes = str(globals_.get("__name__", "?")), _codes_of(code)
        self._found.update(map(id, codes))
        names = list(dict.fromkeys(used for each in codes for used in each.co_names))
        texts = (x for each in codes for x in (*each.co_consts, *each.co_freevars) if isinstance(x, str))
        self._names.append({*names, *texts})
        self.named |= self._names[-1]
        self.sees_gradients |= not _ABOUT_GRADIENTS.isdisjoint(names)
        for used in names:
            if used in globals_:
                self._place(f"{name}.{used}", "item", globals_, used, globals_[used])
        self._importable.update(dict.fromkeys(_modules_named(self._names[-1], globals_)))
        self._imported()
        for path, function in self._methods.pop(id(code), ()):
            self._held_by(path, function)
        for path, module in self._python_modules:
            self._named_in_module(path, module, self._names[-1])

    def imported(self) -> None:
        """Modules were imported, of which a code that was met may name some."""
        self._imported()
        self.reach("what it imports", None)

    def _imported(self) -> None:
        found = [name for name in self._importable if name in sys.modules]
        self._todo += [(name, sys.modules[name]) for name in found]
        for name in found:
            del self._importable[name]

    def absent(self, name: str, globals_: dict[str, Any]) -> None:
        """A global that a code asks for, and that is not there."""
        path = f"{globals_.get('__name__', '?')}.{name}"
        self.facts.append(Fact(path, "absent", globals_, name, True))

    def finds(self, code: types.CodeType) -> bool:
        """Is this the code of a function that was met, or of one inside it?"""
        return id(code) in self._found or id(code) in self._methods

    def is_strange(self, value: Any) -> bool:
        """Is it an object of a class of the user's that was not met?"""
        cls = type(value)
        return not (id(cls) in self._classes or is_of_a_library(module_of(cls)))

    def drawn(self) -> list[Refusal]:
        """Refusals where a generator of numpy has drawn since it was reached, or this was asked."""
        before, self.generators = self.generators, [(p, g, pickle.dumps(g)) for p, g, _ in self.generators]
        return [Refusal(a[0], DRAWS) for a, b in zip(before, self.generators, strict=True) if a[2] != b[2]]

    def asked_of_schedulers(self) -> list[Refusal]:
        """Refusals where the program steps a scheduler, or may ask it for what changes between its calls."""
        stepped = "a scheduler, which the call steps; a replay would not"
        found = [Refusal(path, stepped) for path, each, count in self.schedulers if _count_of(each) != count]
        if self.schedulers and not self.named.isdisjoint(_TOLD_BY_SCHEDULERS):
            found.append(Refusal(self.schedulers[0][0], "a scheduler, which may be asked for its rate"))
        return found

    def newly_remembered(self) -> list[Refusal]:
        """Refusals where a cache was asked for what it did not know: its answer was not looked at."""
        why = "a cache, which is asked for the first time; a replay would ask nothing"
        known = [(path, answers_of(cache), set(map(id, old))) for path, cache, old in self.caches]
        return [Refusal(path, why) for path, now, old in known if not old.issuperset(map(id, now))]

    # -- one thing after the other --------------------------------------------------------------------

    def _place(self, path: str, kind: str, holder: Any, key: Any, value: Any) -> None:
        self.facts.append(Fact(path, kind, holder, key, value))
        self._todo.append((path, value))

    def _visit(self, path: str, value: Any) -> None:
        if is_weak(value):
            self._weakly(path, value)
            return
        if type(value) in _PLAIN or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > _MOST:
            if not any(refusal.what == "the state" for refusal in self.refusals):
                why = f"more than {_MOST} objects are reached, at {path}"
                self.refusals.append(Refusal("the state", why))
            self._todo.clear()
            return
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
            self.met(path, value)
            self._class(path, type(value))
            for name in _OF_TENSORS if value.requires_grad else ():
                self._place(f"{path}.{name}", "attribute", value, name, getattr(value, name, None))
            self._attributes(path, value, [name for name in vars(value) if is_the_users(name)])
        else:
            visit = self._visitor_of(value)
            visit(self, path, value)
            if visit is not World._object and isinstance(value, _CONTAINERS):  # with attributes, perhaps
                self._object(path, value)

    @staticmethod
    def _visitor_of(value: Any) -> Callable[[World, str, Any], None]:
        unasked = answers_itself(value) and not is_built_in(value)
        found = next((each for each in _VISITORS if isinstance(value, each[0])), None)
        return World._object if found is None or (unasked and found[0] in (Mapping, Sequence)) else found[1]

    def _weakly(self, path: str, weak: Any) -> None:
        """A recording holds what the thing holds, and not itself: the program may ask whether it is gone."""
        thing = referent_of(weak)
        self.facts.append(Fact(path, "alive", weak, None, thing is not None))
        if id(thing) not in self._seen:
            self._weak.add(id(thing))
            self._todo.append((path, thing))

    def let_go(self) -> None:
        """Hold no more what only weak references led to."""
        self._seen.update(dict.fromkeys(self._weak))

    def _items(self, path: str, holder: Mapping[Any, Any]) -> None:
        self.facts.append(Fact(path, "keys", holder, None, [*each_of(holder)]))
        for key in each_of(holder):
            self._todo.append((path, key))
            self._place(f"{path}[{_named(key)}]", "item", holder, key, item_of(holder, key))

    def _sequence(self, path: str, holder: Any) -> None:
        if not isinstance(holder, tuple):
            self.facts.append(Fact(path, "length", holder, None, length_of(holder)))
        for place, value in enumerate(each_of(holder)):
            self._place(f"{path}[{place}]", "item", holder, place, value)

    def _set(self, path: str, holder: Any) -> None:
        self._state(path, holder)
        self._todo += [(f"{path}{{}}", value) for value in each_of(holder)]

    def _attributes(self, path: str, holder: Any, names: Any) -> None:
        fields = vars(holder)
        for name in names:
            if name in fields:
                self._place(f"{path}.{name}", "item", fields, name, fields[name])

    def _class(self, path: str, cls: type) -> None:
        """The values and functions of a class of the user's, which its objects read as their own."""
        for base in (*cls.__mro__, *inspect.getmro(type(cls))):
            if is_of_a_library(module_of(base)) or id(base) in self._classes:
                continue
            self._classes[id(base)] = base
            self.facts.append(Fact(path, "members", base, None, (base.__bases__, *vars(base).values())))
            for name, value in vars(base).items():
                if isinstance(value, _METHODS):
                    for function in (value, *(getattr(value, behind, None) for behind in _BEHIND)):
                        self._method_of_class(f"{path}.{name}", function)
                    if name in EXITS:
                        self.exits.add(id(getattr(value, "__code__", None)))
                elif name not in OF_PYTHON:
                    self._member(f"{path}.{name}", base, name, value)

    def _class_of(self, path: str, value: Any) -> None:
        if id(value) not in self._weak:
            self._place(f"{path}.__class__", "attribute", value, "__class__", type(value))
        self._class(path, type(value))

    def _member(self, path: str, cls: type, name: str, value: Any) -> None:
        """What a class holds beside its methods; of what makes attributes its own state."""
        if isinstance(value, _VALUES):
            self._place(path, "attribute", cls, name, value)
        else:
            self._todo.append((path, value))

    def _method_of_class(self, path: str, function: Any) -> None:
        """What it holds is looked at when its code runs: who has a class does not call all of it."""
        if not isinstance(function, types.FunctionType):
            self._todo += [(path, function)] if isinstance(function, CACHE) else []
            return
        for each in (function, inspect.unwrap(function)):
            code = getattr(each, "__code__", None)
            if id(code) in self._seen:
                self._held_by(path, function)
            else:
                self._methods.setdefault(id(code), []).append((path, function))

    def _module(self, path: str, module: nn.Module) -> None:
        self._class_of(path, module)
        own = [name for name in vars(module) if name not in _OF_MODULES]
        self.facts.append(Fact(path, "length", vars(module), None, len(vars(module))))
        self._attributes(path, module, (*_KEPT_OF_MODULES, *own))
        if "forward" not in vars(module):
            self._function(f"{path}.forward", type(module).forward)

    def _optimizer(self, path: str, optimizer: torch.optim.Optimizer) -> None:
        self.sees_gradients = True
        self.optimizers.append(optimizer)
        self._attributes(path, optimizer, _OF_OPTIMIZERS)

    def _function(self, path: str, function: Any) -> None:
        if not isinstance(function, types.FunctionType):
            return
        if is_library(function.__code__.co_filename, function.__globals__):
            self._todo += [(f"{path}.{name}", value) for name, value in vars(function).items()]
            return
        self._held_by(path, function)
        self._code(function.__code__, function.__globals__)

    def _held_by(self, path: str, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                self._place(f"{path}.<{name}>", "cell", cell, None, cell.cell_contents)
            except ValueError:  # an empty cell: assigned later
                continue
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self._place(f"{path}.{name}", "attribute", function, name, getattr(function, name))
        self.facts.append(Fact(path, "length", vars(function), None, len(vars(function))))
        self._attributes(path, function, list(vars(function)))

    def _method(self, path: str, method: types.MethodType) -> None:
        self._todo.append((path, method.__func__))
        self._todo.append((path.rpartition(".")[0] or "self", method.__self__))

    def _partial(self, path: str, made: functools.partial[Any]) -> None:
        for name, value in (("func", made.func), ("args", made.args), ("keywords", made.keywords)):
            self._todo.append((f"{path}.{name}", value))

    def _cache(self, path: str, cache: Any) -> None:
        """What it answers is what it answered, and no call makes it again."""
        answers = answers_of(cache)
        self.caches.append((path, cache, answers))
        self.facts.append(Fact(path, "answers", cache, answers, True))
        self._todo += [(f"{path}()", answer) for answer in answers]
        self._todo.append((path, cache.__wrapped__))
        self._attributes(path, cache, [name for name in vars(cache) if not name.startswith("__")])

    def _python_module(self, path: str, module: types.ModuleType) -> None:
        self._python_modules.append((path, module))
        for names in self._names:
            self._named_in_module(path, module, names)

    def _named_in_module(self, path: str, module: types.ModuleType, names: set[str]) -> None:
        """What a code that has these names and texts can read there, if it names the module."""
        held = re.findall(r"\w+", path)[-1]  # a place in a list has no name
        if held in names or path in names or not held.isidentifier():
            for name in sorted(names & vars(module).keys()):
                if (id(module), name) not in self._codes and vars(module)[name] is not sys.modules:
                    self._codes.add((id(module), name))
                    self._place(f"{path}.{name}", "item", vars(module), name, vars(module)[name])

    def _iterator(self, path: str, value: Any) -> None:
        what = f"{path} ({type(value).__name__})"
        self.refusals.append(Refusal(what, "an iterator, which a replay would not ask"))

    def _array(self, path: str, array: Any) -> None:
        """The content: a tensor that the program makes of it is a constant of the recording."""
        if array.nbytes > _LARGEST_ARRAY or array.dtype.hasobject:
            what = "objects" if array.dtype.hasobject else "numbers"
            self.refusals.append(Refusal(path, f"an array of many {what}, whose content nobody watches"))
        else:
            self._state(path, array)

    def _state(self, path: str, holder: Any) -> None:
        self.facts.append(Fact(path, "content", holder, None, content(holder)))

    def _generator(self, path: str, generator: Any) -> None:
        self.generators.append((path, generator, pickle.dumps(generator)))

    def _namespace(self, path: str, holder: Any) -> None:
        self._items(path, vars(holder))

    def _object(self, path: str, value: Any) -> None:
        cls = type(value)
        if isinstance(value, ContextVar):
            self._place(f"{path}.get()", "context", value, _UNSET, value.get(_UNSET))
            with contextlib.suppress(LookupError):
                self._todo.append((path, value.get()))  # its default, perhaps
        if isinstance(value, _UNWATCHED):
            why = "what it holds is another thing in each thread, or C's: nobody watches it"
            self.refusals.append(Refusal(f"{path} ({cls.__name__})", why))
        if isinstance(value, LRScheduler):
            self.schedulers.append((path, value, _count_of(value)))
        elif is_of_a_library(module_of(cls)):
            self._of_a_library(path, value, module_of(cls).partition(".")[0])
            return
        self._class_of(path, value)
        if hasattr(value, "__dict__"):
            self.facts.append(Fact(path, "length", vars(value), None, len(vars(value))))
            self._attributes(path, value, list(vars(value)))
        for name in slots_of(cls):
            if hasattr(value, name):
                self._place(f"{path}.{name}", "attribute", value, name, getattr(value, name))
            else:
                self.facts.append(Fact(f"{path}.{name}", "unset", value, name, True))
        call = getattr(cls, "__call__", None)  # noqa: B004 - the function is wanted, not whether it is there
        if isinstance(call, types.FunctionType):
            self._function(f"{path}.__call__", call)

    def _of_a_library(self, path: str, value: Any, library: str) -> None:
        """Of the standard library's all that it holds (a queue, a weak set); of torch's its settings."""
        if not hasattr(value, "__dict__"):  # of C: a view of a dict, a method of a list
            if library in _OF_C and not isinstance(value, _CONTAINERS):
                self._todo += [(path, x) for x in gc.get_referents(value) if not isinstance(x, _RUNNING)]
            return
        self._todo.append((path, vars(value).get("__wrapped__")))
        if library in STANDARD - _OF_THE_PROCESS:
            self.facts.append(Fact(path, "length", vars(value), None, len(vars(value))))
            self._attributes(path, value, list(vars(value)))
            return
        # Not the tensors of meshes, say: they are what a mesh is made of, and may be read.
        more = (torch.Tensor,) if isinstance(value, torch.amp.GradScaler) else _OF_LOGGERS
        kinds = (*SCALARS, *more)
        self._attributes(path, value, [name for name, x in vars(value).items() if isinstance(x, kinds)])


_VISITORS: tuple[tuple[Any, Callable[[World, str, Any], None]], ...] = (
    (SCALARS, World._object),  # of a class of the user's
    (nn.Module, World._module),
    (torch.optim.Optimizer, World._optimizer),
    (types.FunctionType, World._function),
    (CACHE, World._cache),
    (types.MethodType, World._method),
    (functools.partial, World._partial),
    (type, World._class),
    (types.ModuleType, World._python_module),
    (np.ndarray, World._array),
    (_GENERATORS, World._generator),
    ((types.SimpleNamespace, argparse.Namespace), World._namespace),
    (Mapping, World._items),
    (Sequence, World._sequence),
    ((set, frozenset), World._set),
    (Iterator, World._iterator),
)


_CONTAINERS = (Mapping, Sequence, set, frozenset, np.ndarray, functools.partial, torch.optim.Optimizer)


def _count_of(scheduler: LRScheduler) -> int | None:
    """How often it was stepped; None of one that is several others (`ChainedScheduler`)."""
    return getattr(scheduler, "last_epoch", None)


def slots_of(cls: type) -> list[str]:
    """By the names that the class holds them under: `__s` is another one inside of it."""
    bases = [base for base in cls.__mro__ if not is_of_a_library(module_of(base))]
    return [name for base in bases for name, x in vars(base).items() if type(x) is _SLOT]


def _modules_named(names: Iterable[str], globals_: Mapping[str, Any]) -> Iterator[str]:
    """Modules that a code may import by these names or texts: its package's own too (`from . import x`)."""
    package = str(globals_.get("__package__") or "").split(".")
    above = ["", *(".".join(package[:n]) + "." for n in range(1, len(package) + 1))]
    return (prefix + name for name in names if name for prefix in above if prefix != ".")


def _named(key: Any) -> str:
    return f"<{type(key).__name__}>" if isinstance(key, torch.Tensor) else repr(key)


def _codes_of(code: types.CodeType) -> list[types.CodeType]:
    """That of a function, and those of the functions inside it."""
    inside = [_codes_of(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return [code, *itertools.chain(*inside)]


def local_of(x: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return x._local_tensor if isinstance(x, TorchDTensor) else x
