"""What a forward leaves in a model beside its result: seen, and put back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint.rng_state import read_rng, write_rng
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.forward.hollow import is_hollow
from shardwright.parallel.pipeline.forward.memory import NOT_OF_THE_MODEL, Memory, looked_at, same_elements
from shardwright.parallel.pipeline.forward.outside import Look, Outside
from shardwright.parallel.pipeline.forward.written import Written

# Beside them torch keeps which want keyword arguments: by numbers that are never given again.
_HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"})


@dataclass
class _Was:
    """A buffer: the object, and a copy of it."""

    value: Any
    inside: Any


class Aside:
    """The buffers, attributes, generators and gradients of a model, and globals that its code names, as now.

    Of gradients there are none until then. `memory` and `changed_buffers` say what a forward has left;
    `put_back` undoes it. What torch and the strategies keep is no part of it; of parameters that are written
    into, `written` has to be on meanwhile.
    """

    def __init__(self, model: nn.Module, outside: Outside) -> None:
        self._outside = Look(outside.all, values=True)
        self._modules = dict(model.named_modules())
        self._buffers = {n: {k: _was(b) for k, b in m._buffers.items()} for n, m in self._modules.items()}
        self.memory = Memory(self._modules, values=True)
        named = (item for module in self._modules.values() for item in vars(module).items())
        self._hooks = [(now, dict(now)) for name, now in named if name in _HOOKS]
        for path, name in self.memory.iterators():
            raise ParallelError(
                f"{path}.{name} leads to an iterator, which learning the borders would advance, and nobody "
                "can put back\n  fix: hold what it goes over, and the number of the next"
            )
        self._generators = read_rng()
        self._parameters = [(p, p.grad, looked_at(p)) for p in model.parameters()]
        for parameter, _, _ in self._parameters:
            parameter.grad = None  # a layer may run a backward of its own
        self.written = Written(model.parameters())

    def changed_buffers(self) -> Iterator[tuple[str, str]]:
        """(module, name) of buffers that have other values than before."""
        for path, module in self._modules.items():
            before = self._buffers[path]
            for name, buffer in module._buffers.items():
                if name not in before or not same_elements(buffer, before[name].inside):
                    yield path, name

    def put_back(self) -> None:
        """Everything as it was."""
        write_rng(self._generators)
        self.memory.put_back()
        self._outside.put_back()
        self.written.put_back()
        for parameter, gradient, attributes in self._parameters:
            parameter.grad = gradient
            attributes.write_to(parameter)
        for now, before in self._hooks:
            for key in {**before, **now}:
                if key not in before and _is_the_models(now[key]):
                    del now[key]
                elif key not in now and _is_the_models(before[key]):
                    now[key] = before[key]
        with torch.no_grad():
            for path, module in self._modules.items():
                _restore(module._buffers, self._buffers[path])


def _is_the_models(hook: Any) -> bool:
    """Not of a strategy, which may put hooks in a module, or take them away, as it runs first."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or ""
    return module.partition(".")[0] not in NOT_OF_THE_MODEL


def _was(value: Any) -> _Was:
    if isinstance(value, Tensor) and not (is_hollow(value) or value.is_meta):
        return _Was(value, value.detach().clone())
    return _Was(value, None)


def _restore(now: dict[str, Any], before: dict[str, _Was]) -> None:
    for name in set(now) - set(before):
        del now[name]
    for name, was in before.items():
        if now.get(name) is not was.value:
            now[name] = was.value
        if isinstance(was.inside, Tensor) and not same_elements(was.value, was.inside):
            was.value.copy_(was.inside)
