"""What can be written into a value without setting it anew: seen, compared and put back."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.parallel.pipeline.forward.hollow import is_hollow

_DEPTH = 3  # how far an object of an object of a container is followed
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# What cannot hold a value of a forward, or is looked at by itself.
_CLOSED = (
    *_PLAIN, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType,
    torch.distributed.ProcessGroup,
)  # fmt: skip


class Inside(Protocol):
    """What was in a value."""

    def differs(self) -> bool:
        """Has it been written into since?"""

    def put_back(self) -> None:
        """Write into it what was there."""


@dataclass
class Was:
    """A value, and what is in it where it can be written into."""

    value: Any
    inside: Inside | None

    def differs(self, value: Any) -> bool:
        """Is it another one now, or written into?"""
        if value is not self.value:
            return not _is_same(value, self.value)
        return self.inside is not None and self.inside.differs()

    def put_back(self) -> None:
        """What was in it."""
        if self.inside is not None and self.inside.differs():
            self.inside.put_back()


class Look:
    """One look at many values.

    Args: copies: keep the elements of tensors, to put them back; else whether they were written into is known
        by their versions, and nothing can be put back.
    """

    def __init__(self, *, copies: bool) -> None:
        self.copies = copies
        self._seen: dict[tuple[int, int], Was] = {}

    def at(self, value: Any, depth: int = _DEPTH) -> Was:
        """The value as it is now."""
        key = id(value), depth
        if key not in self._seen:
            self._seen[key] = Was(value, None if isinstance(value, _CLOSED) else self._inside(value, depth))
        return self._seen[key]

    def _inside(self, value: Any, depth: int) -> Inside | None:
        make = next((make for kind, make in _KINDS.items() if isinstance(value, kind)), _Attributes.of)
        return make(value, depth, self)


@dataclass
class _Elements:
    """Of a tensor: its elements, and the attributes that somebody has set on it."""

    tensor: Tensor
    elements: Tensor | None
    version: int
    attributes: dict[str, Any]

    @classmethod
    def of(cls, x: Tensor, _: int, look: Look) -> _Elements | None:
        if is_hollow(x) or x.is_meta or x.is_inference():
            return None
        return cls(x, x.detach().clone() if look.copies else None, x._version, dict(vars(x)))

    def differs(self) -> bool:
        if self._is_written():
            return True
        there = vars(self.tensor)
        return there.keys() != self.attributes.keys() or any(
            not _is_same(value, self.attributes[name]) for name, value in there.items()
        )

    def _is_written(self) -> bool:
        """Not every kernel that writes raises the version: those of batch norm do not."""
        if self.elements is None:
            return self.tensor._version != self.version
        return not equal(self.tensor, self.elements)

    def put_back(self) -> None:
        with torch.no_grad():
            if self.elements is not None and not equal(self.tensor, self.elements):
                self.tensor.copy_(self.elements)
        vars(self.tensor).clear()
        vars(self.tensor).update(self.attributes)


@dataclass
class _Members:
    """Of a container."""

    container: Any
    copy: Any
    members: list[Was]

    @classmethod
    def of(cls, container: Any, depth: int, look: Look) -> _Members:
        values = container.values() if isinstance(container, dict) else container
        inside = [look.at(v, depth - 1) for v in values] if depth else []
        return cls(container, _copied(container), [one for one in inside if one.inside is not None])

    def differs(self) -> bool:
        return not _same_members(self.container, self.copy) or any(m.differs(m.value) for m in self.members)

    def put_back(self) -> None:
        for member in self.members:
            member.put_back()
        if isinstance(self.container, list):
            self.container[:] = self.copy
            return
        self.container.clear()
        if isinstance(self.container, deque):
            self.container.extend(self.copy)
        else:
            self.container.update(self.copy)


@dataclass
class Numbers:
    """Of a generator of random numbers: where it is."""

    state: Any
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def differs(self) -> bool:
        """Has somebody drawn?"""
        return pickle.dumps(self.read()) != pickle.dumps(self.state)

    def put_back(self) -> None:
        """The next numbers are those that came next."""
        self.write(self.state)


@dataclass
class _Attributes:
    """Of any other object: what it has in `__dict__`."""

    there: dict[str, Any]
    before: dict[str, Was]

    @classmethod
    def of(cls, value: Any, depth: int, look: Look) -> _Attributes | None:
        there = getattr(value, "__dict__", None)
        if not depth or not isinstance(there, dict) or type(value).__module__.startswith(_OURS):
            return None
        return cls(there, {name: look.at(v, depth - 1) for name, v in there.items()})

    def differs(self) -> bool:
        if self.there.keys() != self.before.keys():
            return True
        return any(self.before[name].differs(value) for name, value in self.there.items())

    def put_back(self) -> None:
        for name in self.there.keys() - self.before.keys():
            del self.there[name]
        for name, one in self.before.items():
            if self.there.get(name, self) is not one.value:
                self.there[name] = one.value
            one.put_back()


_OURS = ("torch.", "shardwright.")


def _random(value: random.Random, *_: Any) -> Numbers:
    return Numbers(value.getstate(), value.getstate, value.setstate)


def _numpy(value: np.random.Generator, *_: Any) -> Numbers:
    bits = value.bit_generator
    return Numbers(bits.state, lambda: bits.state, lambda state: setattr(bits, "state", state))


def _legacy_numpy(value: np.random.RandomState, *_: Any) -> Numbers:
    return Numbers(value.get_state(), value.get_state, value.set_state)


def _torch(value: torch.Generator, *_: Any) -> Numbers:
    def read() -> bytes:
        return value.get_state().numpy().tobytes()

    def write(state: bytes) -> None:
        value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Numbers(read(), read, write)


_KINDS: dict[Any, Callable[[Any, int, Look], Inside | None]] = {
    Tensor: _Elements.of,
    (list, dict, set, deque): _Members.of,
    random.Random: _random,
    np.random.Generator: _numpy,
    np.random.RandomState: _legacy_numpy,
    torch.Generator: _torch,
}


def _copied(container: Any) -> Any:
    """What is in it, in a container that nobody else has."""
    if isinstance(container, dict):
        return dict(container)
    return list(container) if isinstance(container, list) else type(container)(container)


def equal(now: Any, before: Any) -> bool:
    """Have two tensors the same elements? Of anything else: is it the same object?"""
    if not isinstance(now, Tensor) or not isinstance(before, Tensor):
        return now is before
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    same = (now == before) | ((now != now) & (before != before))  # noqa: PLR0124  no number is not itself
    return bool(same.all())


def _same_members(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)
    return len(now) == len(before) and all(map(_is_same, now, before))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)
