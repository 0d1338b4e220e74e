"""The tensors of a module by name, whatever strategy placed them: only their layouts are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.manifest import Manifest, SavedTensor
from shardwright.errors import CheckpointError
from shardwright.layout.of_tensor import layout_of

_COMPILED = "_orig_mod."


@dataclass(frozen=True)
class ModelState:
    """What of a module is saved.

    `tensors` holds each tensor once, by its first name; `aliases` maps further names of a tied tensor to it;
    `objects` are the modules that keep extra state of their own, by name.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    objects: dict[str, nn.Module]

    @property
    def identity(self) -> dict[str, SavedTensor]:
        """Name -> what the tensor is."""
        return {name: describe(tensor) for name, tensor in self.tensors.items()}

    def names(self) -> dict[int, str]:
        """Identity of a parameter object -> its name."""
        return {id(tensor): name for name, tensor in self.tensors.items()}


def read_model(model: nn.Module) -> ModelState:
    """The module's persistent tensors, as the live objects.

    `state_dict` is asked rather than `named_parameters`, because its hooks bring a module that a strategy has
    unsharded for computation back to its sharded form, and because it leaves out what is not persistent.

    Raises: CheckpointError: a state_dict hook returns copies, into which nothing could be loaded.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    entries = {name.replace(_COMPILED, ""): one for name, one in model.state_dict(keep_vars=True).items()}
    live = {id(one) for one in (*model.parameters(), *model.buffers())}
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor):
            continue
        if id(value) not in live:
            raise CheckpointError(
                f"the model's state_dict() gives {name!r}, which is none of its parameters and buffers "
                "(a state_dict hook?): it could be saved but not loaded"
            )
        if first.setdefault(id(value), name) == name:
            tensors[name] = value
        else:
            aliases[name] = first[id(value)]
    return ModelState(tensors, aliases, _modules_with_objects(model))


def _modules_with_objects(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that override `get_extra_state`, whose state is no tensor."""
    return {
        name.replace(_COMPILED, ""): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def describe(tensor: torch.Tensor) -> SavedTensor:
    """What a tensor is whatever its layout. Raises: CheckpointError: a DTensor that is still to be summed."""
    if not isinstance(tensor, DTensor):
        return SavedTensor(shape=tuple(tensor.shape), dtype=str(tensor.dtype))
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"a tensor with placements {tensor.placements} is not finished: reduce it first"
        )
    return SavedTensor(shape=tuple(tensor.shape), dtype=str(tensor.dtype), layout=str(layout_of(tensor)))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The storage that this rank holds of a tensor; writing into it writes into the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def differences(manifest: Manifest, here: dict[str, SavedTensor], aliases: dict[str, str]) -> list[str]:
    """What of the model here is not as in the checkpoint, one phrase for each name; empty if all is the same.

    Args: here: name -> tensor, over all ranks. aliases: tied name -> first name, over all ranks.
    """
    saved = manifest.model
    found = [f"{name} is not in the model" for name in saved if name not in here and name not in aliases]
    for name, mine in here.items():
        theirs = saved.get(manifest.aliases.get(name, name))
        if theirs is None:
            found.append(f"{name} is not in the checkpoint")
        elif (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
            found.append(f"{name} is {theirs} in the checkpoint but {mine} in the model")
    return (
        found
        + _untied(manifest.aliases, aliases, "in the checkpoint", "in the model")
        + _untied(aliases, manifest.aliases, "in the model", "in the checkpoint")
    )


def _untied(one: dict[str, str], other: dict[str, str], where: str, but_not: str) -> list[str]:
    """Ties of `one` that `other` does not have (which of the tied names comes first does not matter)."""
    return [
        f"{name} is tied to {first} {where} but not {but_not}"
        for name, first in one.items()
        if other.get(name, name) != other.get(first, first)
    ]
