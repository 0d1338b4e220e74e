"""What forwards keep outside of modules: globals, attributes of classes, variables of enclosing functions.

Which ones code names is read from the code itself: that of a forward, of the methods and functions of the
user's that it names, and so on. What a layer changes, and the model's own code or the loss names too, is
refused: they run on ranks where that layer does not.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from shardwright.parallel.pipeline.forward.memory import NOT_OF_THE_MODEL, Memory

_MISSING = object()
_CELL = "cell_contents"


@dataclass(frozen=True)
class Name:
    """One name: where it stands (globals, a class, a cell), and what it is called in an error."""

    home: Any = field(repr=False)
    name: str
    said: str

    @property
    def key(self) -> tuple[int, str]:
        """The same for the same place."""
        return id(self.home), self.name

    def read(self) -> Any:
        """What it stands for now."""
        if isinstance(self.home, dict):
            return self.home.get(self.name, _MISSING)
        if isinstance(self.home, type):
            return vars(self.home).get(self.name, _MISSING)
        try:
            return self.home.cell_contents
        except ValueError:  # it is empty
            return _MISSING

    def write(self, value: Any) -> None:
        """Let it stand for this."""
        if self.read() is value:
            return
        if isinstance(self.home, dict):
            self.home[self.name] = value
            if value is _MISSING:
                del self.home[self.name]
        elif value is _MISSING:
            delattr(self.home, self.name)
        else:
            setattr(self.home, self.name, value)


class _Reader:
    """Finds the names in functions, and in those of the user's that they name."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Name] = {}
        self._read: set[tuple[types.CodeType, tuple[type, ...]]] = set()

    def read(self, it: Any, owner: tuple[type, ...] = ()) -> None:
        """A function, a method, a module, or what is called like one. owner: the class of its `self`."""
        if isinstance(it, functools.partial):
            self.read(it.func)
        elif isinstance(it, types.MethodType):
            self.read(it.__func__, (type(it.__self__),))
        elif isinstance(it, staticmethod | classmethod | property):
            self.read(it.fget if isinstance(it, property) else it.__func__, owner)
        elif isinstance(it, types.FunctionType):
            self._function(it, owner)
        elif not isinstance(it, type) and _is_of_the_user(type(it)):
            call = "forward" if isinstance(it, nn.Module) else "__call__"
            self.read(getattr(it, "__dict__", {}).get(call))  # put there by somebody
            self._attribute(type(it), call, frozenset())

    def _function(self, function: types.FunctionType, owner: tuple[type, ...]) -> None:
        code = function.__code__
        if (code, owner) in self._read or not _is_of_the_user(function):
            return
        self._read.add((code, owner))
        names = frozenset(_names(code))
        space = function.__globals__
        for name in names & space.keys() | frozenset(_set_globals(code)):
            self._global(space, name, names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._found(Name(cell, _CELL, f"{name}, a variable around {function.__qualname__}"), names)
        for cls in owner:
            for name in names:
                self._attribute(cls, name, names)

    def _global(self, space: dict[str, Any], name: str, names: frozenset[str]) -> None:
        self._found(Name(space, name, f"{name}, a global of {space.get('__name__')}"), names)

    def _found(self, name: Name, names: frozenset[str]) -> None:
        value = name.read()
        if isinstance(value, types.FunctionType):
            self.read(value)
        elif isinstance(value, type):
            for each in names:
                self._attribute(value, each, names)
        elif isinstance(value, types.ModuleType):
            for each in names & vars(value).keys() if _is_of_the_user(value) else ():
                inner = Name(vars(value), each, f"{each}, a global of {value.__name__}")
                if inner.key not in self.found:
                    self._found(inner, names)
        elif not isinstance(value, nn.Module | types.BuiltinFunctionType):
            self.found.setdefault(name.key, name)

    def _attribute(self, cls: type, name: str, names: frozenset[str]) -> None:
        """What a class of the user's has by this name: a method is read, a value is found."""
        home = next((base for base in cls.__mro__ if name in vars(base)), None)
        if home is None or (name.startswith("__") and name != "__call__") or not _is_of_the_user(home):
            return
        value = vars(home)[name]
        if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
            self.read(value, (cls,))
        elif not hasattr(type(value), "__get__"):
            # What is written to a class stands in that class from then on, not in the one that it came from.
            for each in cls.__mro__[: cls.__mro__.index(home) + 1]:
                self._found(Name(each, name, f"{each.__qualname__}.{name}"), names)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _set_globals(code: types.CodeType) -> Iterator[str]:
    return (str(each.argval) for each in dis.get_instructions(code) if each.opname == "STORE_GLOBAL")


def _is_of_the_user(it: Any) -> bool:
    where = it.__name__ if isinstance(it, types.ModuleType) else (getattr(it, "__module__", None) or "")
    return where.partition(".")[0] not in NOT_OF_THE_MODEL


def _names_of(callables: Iterable[Any]) -> dict[tuple[int, str], Name]:
    reader = _Reader()
    for each in callables:
        reader.read(each)
    return reader.found


class Look:
    """What some names stand for now, and what that leads to. values: keep copies, for `put_back`."""

    def __init__(self, names: Iterable[Name], *, values: bool) -> None:
        self._names = {f"{name.said}#{i}": name for i, name in enumerate(names)}
        self._there: Any = types.SimpleNamespace()
        self._fill()
        self._memory = Memory({"": cast("nn.Module", self._there)}, values=values) if self._names else None

    def _fill(self) -> None:
        vars(self._there).update({key: name.read() for key, name in self._names.items()})

    def changed(self) -> list[str]:
        """Those that stand for something else since, or lead to something that has changed."""
        if self._memory is None:
            return []
        self._fill()
        return sorted(self._names[key].said for _, key in self._memory.changed())

    def put_back(self) -> None:
        """Everything as it was."""
        if self._memory is None:
            return
        self._fill()
        self._memory.put_back()
        for key, name in self._names.items():
            name.write(vars(self._there)[key])


@dataclass(frozen=True)
class Outside:
    """The names in the code of a model that was cut.

    all: in any of it. own_code: in layers and in the model's own code; loss: in layers and in the loss.
    """

    all: tuple[Name, ...] = ()
    own_code: tuple[Name, ...] = ()
    loss: tuple[Name, ...] = ()
    last: int = 0

    @classmethod
    def of(cls, parts: Iterable[nn.Module], above: Iterable[nn.Module], loss: Any, last: int) -> Outside:
        """Read it from the code. last: the number of the last stage, where the loss is called."""
        of_layers = _names_of(inner for part in parts for inner in part.modules())
        of_own_code, of_loss = _names_of(above), _names_of([loss])
        return cls(
            tuple({**of_layers, **of_own_code, **of_loss}.values()),
            tuple(name for key, name in of_layers.items() if key in of_own_code),
            tuple(name for key, name in of_layers.items() if key in of_loss),
            last,
        )

    def look(self, stages: tuple[int, ...]) -> Look:
        """Look at what a layer of these stages must not change."""
        others = self.loss if stages != (self.last,) else ()
        return Look({name.key: name for name in (*self.own_code, *others)}.values(), values=False)


def changed_outside(said: str, part: str) -> str:
    """The text of the error."""
    return (
        f"{said}, is changed by the forward of {part}, on its own rank alone, and the model's own code or "
        f"the loss names it too\n  fix: return from {part} what it adds"
    )
