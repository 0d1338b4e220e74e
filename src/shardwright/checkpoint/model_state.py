"""The tensors of a module by name, whatever strategy placed them: only their layouts are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwright.errors import CheckpointError
from shardwright.tensor.modules.wrappers import OF_TORCH

_OF_A_WRAPPER = re.compile("|".join(OF_TORCH))
EXTRA = "_extra_state"


@dataclass(frozen=True)
class ModelState:
    """What of a module is saved.

    `tensors` holds each tensor by every name that it has; `objects` are the modules that keep extra state of
    their own, by name; `others` are entries of its state_dict() that are in neither.
    """

    tensors: dict[str, torch.Tensor]
    objects: dict[str, nn.Module]
    others: tuple[str, ...] = ()


def read_model(model: nn.Module) -> ModelState:
    """The module's persistent tensors, as the live objects.

    `state_dict` is asked rather than `named_parameters`, because its hooks bring a module that a strategy has
    unsharded for computation back to its sharded form, and because it leaves out what is not persistent.

    Raises: CheckpointError: it is no module; a state_dict hook returns copies, into which nothing could be
    loaded.
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"a {type(model).__name__} is no module: give the model itself")
    entries: dict[str, Any] = {}
    for given, one in model.state_dict(keep_vars=True).items():
        if entries.setdefault(_unwrapped(given), one) is not one:
            raise CheckpointError(
                f"two entries of the model are called {_unwrapped(given)!r} without what torch's wrappers "
                f"put into names ({', '.join(OF_TORCH)}): give one of them another name"
            )
    objects = _modules_with_objects(model)
    live = {id(x) for m in model.modules() for x in (*m._parameters.values(), *m._buffers.values())}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor) or name in objects:
            continue
        if is_lazy(value):
            raise CheckpointError(
                f"{name} has no shape yet, for its module is lazy and has not run: call the model once (on "
                "the meta device that costs nothing), or make it with its sizes"
            )
        if id(value) not in live:
            raise CheckpointError(
                f"the model's state_dict() gives {name!r}, which is none of its parameters and buffers "
                "(a state_dict hook?): it could be saved but not loaded"
            )
        for each in _tied_names(name, value):
            tensors[each] = value
    plain = (name for name, value in entries.items() if not isinstance(value, torch.Tensor))
    return ModelState(tensors, objects, tuple(name for name in plain if name not in objects))


def _tied_names(name: str, tensor: torch.Tensor) -> tuple[str, ...]:
    """The names of a tensor, those among them that it has in other stages of a pipeline; else its one name.

    A rank that holds one end of tied weights saves and loads them as a rank that holds both.
    """
    names = getattr(tensor, "names_in_stages", ())
    if not names:
        return (name,)
    tied = tuple(map(_unwrapped, names))
    fitting = [each for each in tied if name == each or name.endswith(f".{each}")]
    own = max(fitting, key=len, default=None)  # one name may end as another does
    if own is None:
        return (name,)
    prefix = name.removesuffix(own)
    return tuple(f"{prefix}{each}" for each in tied)


def _unwrapped(name: str) -> str:
    """A name without the parts that torch's wrappers add: whole parts only."""
    if not _OF_A_WRAPPER.search(name):
        return name
    return ".".join(part for part in name.split(".") if part not in OF_TORCH)


def _modules_with_objects(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that override `get_extra_state`, by the names that torch gives that state: each that it has."""
    return {
        _unwrapped(f"{name}.{EXTRA}".removeprefix(".")): module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
