"""What the attributes of modules lead to, as it is now: objects, containers, tensors, generators."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.parallel.pipeline.forward.hollow import is_hollow
from shardwright.remember import remembered

_PLAIN = (int, float, complex, str, bytes)
_MACHINERY = frozenset({*nn.Module().__dict__, "_flat_weights"})  # the last: a recurrent layer's parameters
_OURS = ("_fsdp", "_shardwright", "pipeline_stages")
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module)
NOT_OF_THE_MODEL = ("torch", "shardwright", "numpy", "builtins", "functools", "threading", "logging")


@dataclass(frozen=True)
class _Kind:
    """How objects of one kind are read, compared with what was read, and written back."""

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]
    members: Callable[[Any], Iterable[Any]] = lambda _: ()


@dataclass
class _Seen:
    """An object, what was in it, and the objects that this led to."""

    it: Any
    kind: _Kind
    inside: Any
    leads_to: list[int]


class Memory:
    """Everything that the attributes of some modules lead to.

    Modules, classes and functions are not entered, nor objects of torch's and of this package. Of tensors
    only whether they were written into.

    Args: modules: by path. values: keep copies of tensors, for `put_back`. buffers: look at those too.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, values: bool, buffers: bool = False) -> None:
        self._modules, self._buffers = modules, buffers
        self._tensors = _TENSOR if values else _TENSOR_SEEN
        self._seen: dict[int, _Seen] = {}
        self._was = {path: self._named(module) for path, module in modules.items()}
        for attributes in self._was.values():
            for value in attributes.values():
                self._enter(value)

    def _named(self, module: nn.Module) -> dict[str, Any]:
        found = {k: v for k, v in module.__dict__.items() if k not in _MACHINERY and not k.startswith(_OURS)}
        return {**module._buffers, **found} if self._buffers else found

    def _enter(self, value: Any) -> None:
        """Read an object and all that it leads to; not by calls of itself, for chains may be long."""
        todo = [value]
        while todo:
            it = todo.pop()
            kind = self._kind(it)
            if kind is None or id(it) in self._seen:
                continue
            inside = kind.read(it)
            members = [m for m in kind.members(inside) if self._kind(m) is not None]
            self._seen[id(it)] = _Seen(it, kind, inside, [id(m) for m in members])
            todo += members

    def _kind(self, it: Any) -> _Kind | None:
        if it is None or type(it) in _PLAIN or isinstance(it, _CODE):
            return None
        if isinstance(it, Tensor):
            return None if is_hollow(it) or it.is_meta or it.is_inference() else self._tensors
        if isinstance(it, types.GeneratorType) or _is_of_python(type(it)):
            return _ITERATOR
        for kind, classes in _KINDS:
            if isinstance(it, classes):
                return kind
        home = type(it).__module__.partition(".")[0]
        if home in NOT_OF_THE_MODEL or not (hasattr(it, "__dict__") or _slots(it)):
            return None
        return _OBJECT

    def changed(self) -> Iterator[tuple[str, str]]:
        """(module, name) of attributes that are others now, or lead to something that is."""
        touched = {key for key, seen in self._seen.items() if not _is_as_it_was(seen)}
        for path, module in self._modules.items():
            before = self._was[path]
            for name, value in self._named(module).items():
                same = name in before and _is_same(value, before[name])
                if not same or (touched and touched & self._reached(value)):
                    yield path, name

    def changed_generators(self) -> Iterator[tuple[str, str]]:
        """(module, name) of attributes that lead to a generator which has drawn."""
        return self._leading_to(lambda seen: seen.kind in _GENERATORS and not _is_as_it_was(seen))

    def iterators(self) -> Iterator[tuple[str, str]]:
        """(module, name) of attributes that lead to an iterator, which nobody can put back."""
        return self._leading_to(lambda seen: seen.kind is _ITERATOR)

    def _leading_to(self, what: Callable[[_Seen], bool]) -> Iterator[tuple[str, str]]:
        keys = {key for key, seen in self._seen.items() if what(seen)}
        for path, before in self._was.items() if keys else ():
            for name, value in before.items():
                if keys & self._reached(value):
                    yield path, name

    def changed_numbers(self) -> Iterator[tuple[str, str]]:
        """(module, name) of attributes that are numbers, and other ones than before."""
        for path, name in self.changed():
            value = self._modules[path].__dict__.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield path, name

    def shared(self, part_of: Callable[[str], str | None]) -> Iterator[tuple[str, str]]:
        """(module, name) of what has changed in a part, and is one object with what another part has."""
        touched = {
            key
            for key, seen in self._seen.items()
            if not isinstance(seen.it, Tensor) and not _is_as_it_was(seen)
        }
        homes: dict[int, set[str | None]] = {}
        places: list[tuple[str, str, set[int]]] = []
        for path, before in self._was.items() if touched else ():
            for name, value in before.items():
                reached = touched & self._reached(value)
                places.append((path, name, reached))
                for key in reached:
                    homes.setdefault(key, set()).add(part_of(path))
        for path, name, reached in places:
            if part_of(path) is not None and any(len(homes[key]) > 1 for key in reached):
                yield path, name

    def _reached(self, value: Any) -> set[int]:
        found: set[int] = set()
        todo = [id(value)]
        while todo:
            key = todo.pop()
            if key in self._seen and key not in found:
                found.add(key)
                todo += self._seen[key].leads_to
        return found

    def put_back(self) -> None:
        """Everything as it was."""
        for seen in self._seen.values():
            if not _is_as_it_was(seen):
                seen.kind.write(seen.it, seen.inside)
        for path, module in self._modules.items():
            before = self._was[path]
            for name in set(self._named(module)) - set(before):
                del module.__dict__[name]
            module.__dict__.update(before)


def _is_of_python(cls: type) -> bool:
    """An iterator of `itertools`, or over a container; a file is one too, and has its place."""
    home, name = cls.__module__, cls.__name__
    return hasattr(cls, "__next__") and (
        home == "itertools" or (home == "builtins" and name.endswith("iterator"))
    )


def _is_as_it_was(seen: _Seen) -> bool:
    return seen.kind.same(seen.it, seen.inside)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)


def _stored(it: Any) -> Any:
    """What a container holds. Its class may hand out other things, each time new ones (`ACT2FN`: modules)."""
    base = next(each for each in (OrderedDict, dict, list, deque) if isinstance(it, each))
    inside = base.__iter__(it)
    return {key: dict.__getitem__(it, key) for key in inside} if issubclass(base, dict) else list(inside)


def _same_list(now: Any, before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(_is_same, now, before))


def _same_dict(now: Any, before: dict[Any, Any]) -> bool:
    return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)


def _refill(it: Any, inside: Any) -> None:
    it.clear()
    (it.update if isinstance(it, dict | set) else it.extend)(inside)


def _slots(it: Any) -> Mapping[str, Any]:
    """Where an object, of a class that is written in Python, keeps what is in no `__dict__`."""
    return _slots_of(cast("Hashable", type(it)))


@remembered(4096)
def _slots_of(cls: type) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__slots__" in vars(base):
            found |= {n: d for n, d in vars(base).items() if isinstance(d, types.MemberDescriptorType)}
    return found


def _attributes(it: Any) -> dict[str, Any]:
    slots = {name: getattr(it, name) for name in _slots(it) if hasattr(it, name)}
    return {**slots, **getattr(it, "__dict__", {})}


def _write_attributes(it: Any, inside: dict[str, Any]) -> None:
    slots = _slots(it)
    for name, slot in slots.items():
        if name in inside:
            slot.__set__(it, inside[name])  # also of one that is frozen
        elif hasattr(it, name):
            slot.__delete__(it)
    if hasattr(it, "__dict__"):
        vars(it).clear()
        vars(it).update({name: value for name, value in inside.items() if name not in slots})


@dataclass(frozen=True)
class _InTensor:
    """What is in a tensor: its elements, by their version where they are not kept; what was set on it."""

    version: int
    elements: Tensor | None
    attributes: dict[str, Any]

    def is_in(self, x: Tensor) -> bool:
        """Not every kernel that writes raises the version: those of batch norm do not."""
        same = x._version == self.version if self.elements is None else same_elements(x, self.elements)
        return same and _same_dict(_set_on(x), self.attributes)

    def write_to(self, x: Tensor) -> None:
        """Put it back."""
        with torch.no_grad():
            if self.elements is not None and not same_elements(x, self.elements):
                x.copy_(self.elements)
        for name in _set_on(x).keys() - self.attributes.keys():
            del vars(x)[name]
        vars(x).update(self.attributes)


def _set_on(x: Tensor) -> dict[str, Any]:
    """The attributes that the model has set on a tensor; this package has its own, and torch."""
    return {k: v for k, v in vars(x).items() if not k.startswith("_") and k != "in_hands"}


def looked_at(x: Tensor) -> _InTensor:
    """Its version, and what was set on it."""
    return _InTensor(x._version, None, _set_on(x))


def same_elements(now: Any, before: Any) -> bool:
    """Have two tensors the same elements? Of anything else: is it the same object?"""
    if not isinstance(now, Tensor) or not isinstance(before, Tensor):
        return now is before
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    same = (now == before) | ((now != now) & (before != before))  # noqa: PLR0124  no number is not itself
    return bool(same.all())


def _same_state(now: Any, before: Any) -> bool:
    return bool(torch.equal(now, before)) if isinstance(now, Tensor) else repr(now) == repr(before)


def _states(read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> _Kind:
    return _Kind(read, lambda it, before: _same_state(read(it), before), write)


def _write_array(it: Any, inside: Any) -> None:
    it[...] = inside


_TENSOR = _Kind(
    lambda x: _InTensor(x._version, x.detach().clone(), _set_on(x)),
    lambda x, before: before.is_in(x),
    lambda x, before: before.write_to(x),
)
_TENSOR_SEEN = _Kind(looked_at, _TENSOR.same, _TENSOR.write)
_LIST = _Kind(_stored, lambda it, was: _same_list(_stored(it), was), _refill, lambda inside: inside)
_SET = _Kind(set, lambda now, before: bool(now == before), _refill)
_DICT = _Kind(_stored, lambda it, was: _same_dict(_stored(it), was), _refill, lambda inside: inside.values())
_BYTES = _Kind(bytes, lambda now, was: bytes(now) == was, lambda it, was: it.__setitem__(slice(None), was))
_ITERATOR = _Kind(lambda _: None, lambda *_: True, lambda *_: None)
_TUPLE = _Kind(tuple, lambda *_: True, lambda *_: None, lambda inside: inside)
_ARRAY = _Kind(lambda it: it.copy(), lambda now, before: now.tobytes() == before.tobytes(), _write_array)
_OBJECT = _Kind(
    _attributes,
    lambda it, before: _same_dict(_attributes(it), before),
    _write_attributes,
    lambda inside: inside.values(),
)
_TORCH = _states(lambda it: it.get_state(), lambda it, state: it.set_state(state))
_PYTHON = _states(lambda it: it.getstate(), lambda it, state: it.setstate(state))
_NUMPY = _states(
    lambda it: it.bit_generator.state, lambda it, state: setattr(it.bit_generator, "state", state)
)
_OLD_NUMPY = _states(lambda it: it.get_state(), lambda it, state: it.set_state(state))
_GENERATORS = (_TORCH, _PYTHON, _NUMPY, _OLD_NUMPY)
_KINDS: tuple[tuple[_Kind, Any], ...] = (
    (_LIST, (list, deque)),
    (_SET, set),
    (_BYTES, bytearray),
    (_DICT, dict),
    (_TUPLE, tuple),
    (_ARRAY, np.ndarray),
    (_TORCH, torch.Generator),
    (_PYTHON, random.Random),
    (_NUMPY, np.random.Generator),
    (_OLD_NUMPY, np.random.RandomState),
)
