"""What a forward leaves in a model beside its result: seen, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardwright.checkpoint.rng_state import read_rng, write_rng
from shardwright.parallel.pipeline.forward.inside import Look, Numbers, Was

_NUMBERS = (int, float)
_MACHINERY = frozenset(nn.Module().__dict__)
_OURS = ("_fsdp", "_shardwright", "pipeline_stages")


class Aside:
    """The buffers, attributes and generators of a model as they are now.

    `changed` says what a forward has left; `put_back` undoes it. Parameters are no part of it, nor what torch
    and the strategies keep in a module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        at = Look(copies=True).at
        self._buffers = {n: {k: at(b) for k, b in m._buffers.items()} for n, m in self._modules.items()}
        self._attributes = {
            n: {k: at(v) for k, v in attributes_of(m).items()} for n, m in self._modules.items()
        }
        self._generators = read_rng()

    def changed_buffers(self) -> Iterator[tuple[str, str]]:
        """(module, name) of buffers that have other values than before."""
        for path, module in self._modules.items():
            before = self._buffers[path]
            for name, buffer in module._buffers.items():
                if name not in before or before[name].differs(buffer):
                    yield path, name

    def changed_attributes(self, *, numbers: bool = False) -> Iterator[tuple[str, str]]:
        """(module, name) of attributes that were set or written into; `numbers`: those that count."""
        for path, module in self._modules.items():
            before = self._attributes[path]
            for name, value in attributes_of(module).items():
                was = before.get(name)
                counts = isinstance(value, _NUMBERS) and not isinstance(value, bool)
                if (counts or not numbers) and (was is None or was.differs(value)):
                    yield path, name

    def drawn_from(self) -> Iterator[tuple[str, str]]:
        """(module, name) of generators of random numbers that somebody has drawn from."""
        for path, name in self.changed_attributes():
            was = self._attributes[path].get(name)
            if was is not None and isinstance(was.inside, Numbers):
                yield path, name

    def shared_objects(self, part_of: Callable[[str], str | None]) -> Iterator[tuple[str, str]]:
        """(module, name) of objects that a part has written into and that another part, or none, has too."""
        homes: dict[int, set[str | None]] = {}
        for path, attributes in self._attributes.items():
            for was in attributes.values():
                if was.inside is not None:
                    homes.setdefault(id(was.value), set()).add(part_of(path))
        for path, attributes in self._attributes.items():
            for name, was in attributes.items():
                shared = part_of(path) is not None and len(homes.get(id(was.value), ())) > 1
                if shared and was.inside is not None and was.inside.differs():
                    yield path, name

    def put_back(self) -> None:
        """Everything as it was."""
        write_rng(self._generators)
        for path, module in self._modules.items():
            _restore(module._buffers, self._buffers[path], set(module._buffers))
            _restore(module.__dict__, self._attributes[path], set(attributes_of(module)))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What it has of its own: not what torch and the strategies keep in every module."""
    there = module.__dict__.items()
    return {k: v for k, v in there if k not in _MACHINERY and not k.startswith(_OURS)}


def _restore(now: Any, before: dict[str, Was], there: set[str]) -> None:
    for name in there - set(before):
        del now[name]
    for name, was in before.items():
        if now.get(name) is not was.value:
            now[name] = was.value
        was.put_back()
