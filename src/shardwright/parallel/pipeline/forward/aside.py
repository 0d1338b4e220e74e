"""What a forward leaves in a model beside its result: seen, and put back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint.rng_state import read_rng, write_rng
from shardwright.parallel.pipeline.forward.hollow import is_hollow

_CONTAINERS = (list, dict, set, deque)
_NUMBERS = (int, float)
_PLAIN = (int, float, complex, str, bytes)


@dataclass
class _Was:
    """An attribute: the object, and a copy of what is in it where it can be written into."""

    value: Any
    inside: Any


class Aside:
    """The buffers, attributes and generators of a model as they are now.

    `changed` says what a forward has left; `put_back` undoes it. Parameters are no part of it, nor what torch
    and the strategies keep in a module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._machinery = frozenset(nn.Module().__dict__)
        self._modules = dict(model.named_modules())
        self._buffers = {n: {k: _was(b) for k, b in m._buffers.items()} for n, m in self._modules.items()}
        self._attributes = {n: {k: _was(v) for k, v in self._of(m).items()} for n, m in self._modules.items()}
        self._generators = read_rng()

    def _of(self, module: nn.Module) -> dict[str, Any]:
        return {k: v for k, v in module.__dict__.items() if k not in self._machinery and not _ours(k)}

    def changed_buffers(self) -> Iterator[tuple[str, str]]:
        """(module, name) of buffers that have other values than before."""
        for path, module in self._modules.items():
            before = self._buffers[path]
            for name, buffer in module._buffers.items():
                if name not in before or not _equal(buffer, before[name].inside):
                    yield path, name

    def changed_attributes(self, *, numbers: bool = False) -> Iterator[tuple[str, str]]:
        """(module, name) of attributes that were set to something else; `numbers`: those that count."""
        for path, module in self._modules.items():
            before = self._attributes[path]
            for name, value in self._of(module).items():
                was = before.get(name)
                if was is not None and was.value is value and not isinstance(value, _CONTAINERS):
                    continue
                counts = isinstance(value, _NUMBERS) and not isinstance(value, bool)
                if (counts and (was is None or value != was.value)) if numbers else _differs(was, value):
                    yield path, name

    def shared_containers(self, part_of: Callable[[str], str | None]) -> Iterator[tuple[str, str]]:
        """(module, name) of containers that a part has changed and that another part, or none, has too."""
        homes: dict[int, set[str | None]] = {}
        for path, module in self._modules.items():
            for value in self._of(module).values():
                if isinstance(value, _CONTAINERS):
                    homes.setdefault(id(value), set()).add(part_of(path))
        for path, name in self.changed_attributes():
            value = self._modules[path].__dict__[name]
            if part_of(path) is not None and len(homes.get(id(value), ())) > 1:
                yield path, name

    def put_back(self) -> None:
        """Everything as it was."""
        write_rng(self._generators)
        with torch.no_grad():
            for path, module in self._modules.items():
                _restore(module._buffers, self._buffers[path], set(module._buffers))
                _restore(module.__dict__, self._attributes[path], set(self._of(module)))


def _ours(name: str) -> bool:
    return name.startswith(("_fsdp", "_shardwright", "pipeline_stages"))


def _was(value: Any) -> _Was:
    if isinstance(value, Tensor) and not (is_hollow(value) or value.is_meta):
        return _Was(value, value.detach().clone())
    return _Was(value, copy.copy(value) if type(value) in _CONTAINERS else None)


def _restore(now: Any, before: dict[str, _Was], there: set[str]) -> None:
    for name in there - set(before):
        del now[name]
    for name, was in before.items():
        if now.get(name) is not was.value:
            now[name] = was.value
        if isinstance(was.inside, Tensor) and not _equal(was.value, was.inside):
            was.value.copy_(was.inside)
        elif was.inside is not None and not isinstance(was.inside, Tensor):
            _refill(was.value, was.inside)


def _refill(container: Any, inside: Any) -> None:
    if isinstance(container, list):
        container[:] = inside
        return
    container.clear()
    if isinstance(container, deque):
        container.extend(inside)
    else:
        container.update(inside)


def _equal(now: Any, before: Any) -> bool:
    if not isinstance(now, Tensor) or not isinstance(before, Tensor):
        return now is before
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    same = (now == before) | ((now != now) & (before != before))  # noqa: PLR0124  no number is not itself
    return bool(same.all())


def _differs(was: _Was | None, value: Any) -> bool:
    if was is None:
        return True
    if type(value) in _CONTAINERS and was.value is value:
        return not _same_members(value, was.inside)
    return was.value is not value


def _same_members(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(now[key], before[key]) for key in now)
    return len(now) == len(before) and all(map(_is_same, now, before))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)
