"""The arguments of a call on lists, taken in one pass: what identifies them, and what the local call gets."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.rules.call import Args, Kwargs
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.wrap import CLASSES

_local = attrgetter("_local_tensor")
_token = attrgetter("_spec.token")
_NUMBERS = frozenset({bool, int, float, complex})


class Taken:
    """A call on lists, taken apart. An optimizer gives every parameter at every step: no frame per element.

    key:     the tokens of DTensors, shapes and dtypes of plain tensors, classes of everything, in order;
        numbers (learning rates, corrections of a step) by their class alone.
    numbers: these, in order.
    foreign: a DTensor of torch's own is among them. plain: a plain tensor is.
    args:    the positional arguments with local tensors; `kwargs` by name.
    """

    __slots__ = ("args", "foreign", "key", "kwargs", "numbers", "plain")

    def __init__(self, first: tuple[Any, ...], args: Args, kwargs: Kwargs) -> None:
        self.key: list[Any] = [*first]
        self.numbers: list[Any] = []
        self.foreign = self.plain = False
        self.args = [self._take(value) for value in args]
        self.kwargs: dict[str, Any] = {}
        for name, value in kwargs.items():
            self.key.append(name)
            self.kwargs[name] = self._take(value)

    def _take(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return self._take_list(value)
        if isinstance(value, DTensor):
            self.key.append(value._spec.token)
            return value._local_tensor
        if isinstance(value, torch.Tensor):
            self.foreign |= isinstance(value, TorchDTensor)
            self.plain = True
            self.key += value.shape, value.dtype
            return value
        self.key.append(value.__class__)
        if value.__class__ in _NUMBERS:
            self.numbers.append(value)
        else:
            self.key.append(value)
        return value

    def _take_list(self, values: list[Any] | tuple[Any, ...]) -> Any:
        self.key.append(len(values))
        classes = set(map(type, values))
        if classes.issubset(CLASSES):
            self.key += map(_token, values)
            return list(map(_local, values))
        if classes <= _NUMBERS:
            self.key += map(type, values)
            self.numbers += values
            return values
        return [self._take(value) for value in values]
