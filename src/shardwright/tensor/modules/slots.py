"""The places of a module tree that hold parameters, and a module as it was before an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat.fully_shard.units import forget_unit


@dataclass(frozen=True, slots=True)
class Slot:
    """One place where a parameter is registered; a tied parameter has several."""

    owner: nn.Module
    name: str
    path: str

    def get(self) -> nn.Parameter:
        """The parameter that stands here now."""
        parameter = self.owner._parameters[self.name]
        if parameter is None:
            raise KeyError(self.path)
        return parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Register another parameter here; hooks of the module are not run."""
        self.owner._parameters[self.name] = parameter


def slots_of(module: nn.Module) -> Iterator[Slot]:
    """Every place in the module tree that holds a parameter, each name of a tied one included."""
    for prefix, owner in module.named_modules(remove_duplicate=True):
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield Slot(owner, name, f"{prefix}.{name}" if prefix else name)


def local_plain(parameter: nn.Parameter) -> torch.Tensor:
    """What is stored on this rank: the local tensor of a DTensor, the tensor itself otherwise."""
    if isinstance(parameter, TorchDTensor):
        return parameter._local_tensor.detach()
    return parameter.detach()


@contextmanager
def unchanged_on_error(module: nn.Module) -> Iterator[None]:
    """On an error within the block every module of the tree is as it was: registries, hooks, class."""
    before = [(child, type(child), _attributes(child)) for child in module.modules()]
    try:
        yield
    except BaseException:
        for child, cls, attributes in before:
            _restore(child, cls, attributes)
        raise


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What hangs on a module; its registries as copies."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}


def _restore(module: nn.Module, cls: type[nn.Module], attributes: dict[str, Any]) -> None:
    if type(module) is not cls:  # `fully_shard` made a unit of it
        module.__class__ = cls
    forget_unit(module)
    now = vars(module)
    for name in set(now) - set(attributes):
        del now[name]
    for name, value in attributes.items():
        if isinstance(value, dict) and isinstance(now.get(name), dict):
            now[name].clear()
            now[name].update(value)
        else:
            now[name] = value
