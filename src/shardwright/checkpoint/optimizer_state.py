"""The state of an optimizer, keyed by parameter name and never by position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from shardwright.checkpoint.optimizer_methods import (
    after_load,
    load_by_its_methods,
    loads_itself,
    refuse_what_is_lost,
)
from shardwright.checkpoint.pieces import local_of
from shardwright.checkpoint.storage.element_types import DTYPES
from shardwright.checkpoint.storage.manifest import SavedOptimizer, SavedTensor
from shardwright.checkpoint.storage.values import Keep, canonical, decode, encode
from shardwright.compat import tree_map_only
from shardwright.errors import CheckpointError

# In place of a parameter's name: what an optimizer keeps for itself, under other keys than parameters.
OWN = ""
_COUNTER = "step"  # torch's optimizers keep it as a plain 0-d tensor, also beside a 0-d parameter
_PARAMS = "params"
_NAMES = "param_names"
_NO_SETTINGS = (_PARAMS, _NAMES)  # what the parameters are called is known from the model
# What torch's schedulers and its averages of weights note in the groups of any optimizer.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


@dataclass
class OptimizerPart:
    """What one rank has of an optimizer beside its tensors: as JSON, parameters by name.

    Args: named: it was given the names of its parameters, which torch keeps in its groups.
    """

    kind: str
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    named: bool = False


def parameters_of(optimizer: Optimizer, names: dict[int, str], path: str) -> dict[str, torch.Tensor]:
    """Name -> parameter, of all that the optimizer updates.

    Raises: CheckpointError: it updates a tensor that is no parameter of the state.
    """
    named: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group[_PARAMS]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {number} of {path} updates a tensor {list(parameter.shape)} that is no parameter "
                    "of the model (or of another module of the state): make the optimizer after the "
                    "parameters have been placed, and give the module whose parameters it updates beside it"
                )
            name = names[id(parameter)]
            if named.setdefault(name, parameter) is not parameter:
                raise CheckpointError(
                    f"{path} updates {name} as two tensors of one memory, and the checkpoint has it as one: "
                    "tie them by one object (other.weight = one.weight) before the optimizer is made"
                )
    return named


def read_optimizer(
    optimizer: Optimizer,
    names: dict[int, str],
    path: str,
    keep: Callable[[str, torch.Tensor], None],
    keep_of_value: Keep,
) -> OptimizerPart:
    """The optimizer without its tensors; those are handed to `keep`, the live objects, by their keys.

    Args: names: identity of a parameter object -> its name.
    Raises: CheckpointError: a state that cannot be saved, or has no name of its own.
    """
    refuse_what_is_lost(optimizer, path)
    named = any(_NAMES in group for group in optimizer.param_groups)
    part = OptimizerPart(type(optimizer).__name__, [], named=named)
    for number, group in enumerate(optimizer.param_groups):
        settings = {
            key: encode(value, f"{path}/group {number}/{key}")
            for key, value in group.items()
            if key not in _NO_SETTINGS
        }
        part.groups.append({**settings, _PARAMS: [names.get(id(one), "") for one in group[_PARAMS]]})
    parameters = parameters_of(optimizer, names, path)
    states = {name: optimizer.state.get(tensor, {}) for name, tensor in parameters.items()}
    for parameter, state in (states | {OWN: own_state(optimizer)}).items():
        for name, value in state.items():
            if type(name) is not str or "/" in name:
                raise CheckpointError(
                    f"{path} calls a state of {parameter or 'its own'} {name!r}: a name is text without a "
                    "slash"
                )
            key = f"{path}/{parameter}/{name}"
            if isinstance(value, torch.Tensor) and parameter != OWN:
                keep(key, value)
            else:
                part.values.setdefault(parameter, {})[name] = encode(value, key, keep_of_value)
    return part


def own_state(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps in `state` for itself, and for no parameter."""
    state: dict[Any, Any] = optimizer.state
    return {name: one for name, one in state.items() if not isinstance(name, torch.Tensor)}


def merge(path: str, parts: list[OptimizerPart]) -> dict[str, Any]:
    """One optimizer from those of ranks that hold different parameters of it (pipeline stages).

    Raises: CheckpointError: ranks disagree about its class, its settings or a value.
    """
    first = parts[0]
    groups: dict[tuple[int, str], dict[str, Any]] = {}  # by place and settings: a stage may have its own
    values = dict(first.values)
    for part in parts:
        if part.kind != first.kind:
            raise CheckpointError(f"{path} is another optimizer on some ranks")
        for place, other in enumerate(part.groups):
            mine = groups.setdefault((place, canonical({**other, _PARAMS: 0})), {**other, _PARAMS: []})
            mine[_PARAMS] = list(dict.fromkeys((*mine[_PARAMS], *other[_PARAMS])))
    _refuse_two_settings(path, list(groups.values()))
    for part in parts[1:]:
        for parameter, mine_too in part.values.items():
            if canonical(values.setdefault(parameter, mine_too)) != canonical(mine_too):
                raise CheckpointError(_differing(f"{path}/{parameter}", values[parameter], mine_too))
    return {"kind": first.kind, "groups": [groups[key] for key in sorted(groups)], "values": values}


def _refuse_two_settings(path: str, groups: list[dict[str, Any]]) -> None:
    """Raises CheckpointError where ranks have one parameter in groups with different settings."""
    seen: dict[str, dict[str, Any]] = {}
    for group in groups:
        for parameter in group[_PARAMS]:
            mine = seen.setdefault(parameter, group)
            if mine is not group:
                names = [key for key in dict.fromkeys((*mine, *group)) if key != _PARAMS]
                differ = [key for key in names if canonical(mine.get(key)) != canonical(group.get(key))]
                raise CheckpointError(
                    f"{path}: the ranks have different settings of {parameter} "
                    f"({', '.join(differ) or 'another group'})"
                )


def _differing(key: str, one: dict[str, Any], other: dict[str, Any]) -> str:
    names = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    return (
        f"{key}: the ranks have different values of the optimizer's state ({', '.join(names)}), so "
        "there is no one value to save: make them equal first, or keep them outside of the optimizer"
    )


def states_of(path: str, tensors: dict[str, SavedTensor], parameters: set[str]) -> dict[tuple[str, str], str]:
    """(parameter, state) -> key, of an optimizer's tensors in a checkpoint."""
    found: dict[tuple[str, str], str] = {}
    for key in tensors:
        if key.startswith(f"{path}/"):
            parameter, _, name = key[len(path) + 1 :].rpartition("/")
            if parameter in parameters:
                found[parameter, name] = key
    return found


def empty_state(
    key: str, saved: SavedTensor, beside: SavedTensor | None, parameter: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """A tensor for a state that the optimizer does not have yet, laid out as its parameter.

    One of another shape is whole on every rank of its parameter, as `new_zeros` makes it: every layout is
    right, and which one the optimizer would choose is not known before it has made it.

    Args: beside: its parameter, as it was saved. device: where the optimizer counts its steps.
    """
    dtype = DTYPES[saved.dtype]
    counts = key.endswith(f"/{_COUNTER}")
    if tuple(parameter.shape) == saved.shape and not counts:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    was_plain = beside is not None and not beside.distributed  # says nothing of what it is beside a DTensor
    if saved.distributed or (was_plain and saved.shape and not counts):
        return parameter.detach().new_empty(saved.shape, dtype=dtype)
    return torch.empty(saved.shape, dtype=dtype, device=device)


def placed_as_states(
    values: dict[str, Any], parameter: torch.Tensor, *, as_parameter: bool
) -> dict[str, Any]:
    """Values that an optimizer keeps for a parameter, the plain tensors in them where the parameter is.

    Args: as_parameter: such a tensor was plain as its parameter was, so that it is whole on all ranks of one
        that is placed now.
    """

    def placed(found: torch.Tensor) -> torch.Tensor:
        if type(found) is not torch.Tensor:
            return found
        if not as_parameter:
            return found.to(parameter.device)
        made = parameter.detach().new_empty(found.shape, dtype=found.dtype)
        local = local_of(made)
        if local.shape == found.shape:  # not on a rank that is not of its mesh
            local.copy_(found)
        return made

    return {
        name: value if name == _COUNTER else tree_map_only(torch.Tensor, placed, value)
        for name, value in values.items()
    }


def step_devices(optimizer: Optimizer) -> dict[int, torch.device]:
    """Where each parameter's counters live: on the CPU unless the group is fused or capturable."""
    cpu = torch.device("cpu")
    return {
        id(one): one.device if group.get("fused") or group.get("capturable") else cpu
        for group in optimizer.param_groups
        for one in group[_PARAMS]
    }


def check_groups(
    optimizer: Optimizer, names: dict[int, str], saved: SavedOptimizer, path: str
) -> list[dict[str, Any]]:
    """The saved settings in the order of the groups here.

    Raises: CheckpointError: another kind of optimizer, or the parameters are grouped in another way.
    """
    if saved.kind not in ("", type(optimizer).__name__):
        raise CheckpointError(
            f"{path}: the checkpoint holds the state of {saved.kind}, not of {type(optimizer).__name__}"
        )
    mine = [frozenset(names[id(one)] for one in group[_PARAMS]) for group in optimizer.param_groups]
    held = frozenset().union(*mine)
    theirs: dict[frozenset[str], list[dict[str, Any]]] = {}
    for group in saved.groups:
        settings = {key: one for key, one in group.items() if key not in _NO_SETTINGS}
        theirs.setdefault(frozenset(map(str, group.get(_PARAMS, ()))) & held, []).append(settings)
    for names_here in mine:
        if names_here not in theirs:
            theirs[names_here] = [_common(names_here, theirs)]
    alike = {group: _in_order(found, mine.count(group), path) for group, found in theirs.items()}
    chosen = [alike[group].pop(0) for group in mine]
    if not saved.kind:
        _refuse_other_settings(optimizer, chosen, path)
    return [{key: decode(one, f"{path}/{key}") for key, one in group.items()} for group in chosen]


def _common(group: frozenset[str], theirs: dict[frozenset[str], list[dict[str, Any]]]) -> dict[str, Any]:
    """The settings of parameters that are grouped in another way in the checkpoint.

    Raises: CheckpointError: they are not known there, or have different ones.
    """
    found = [settings for names, of in theirs.items() if names & group for settings in of]
    known = frozenset().union(*theirs)
    if not found or not group <= known or any(canonical(one) != canonical(found[0]) for one in found):
        raise CheckpointError(
            f"the optimizer's groups differ: no group of the checkpoint holds just the {len(group)} "
            f"parameters of {min(group, default='an empty group')}'s group here, and their settings "
            "there are not the same"
        )
    return found[0]


def _refuse_other_settings(optimizer: Optimizer, groups: list[dict[str, Any]], path: str) -> None:
    """Raises CheckpointError where an optimizer, whose class another program did not say, is none of this."""
    for mine, group in zip(optimizer.param_groups, groups, strict=True):
        unknown = sorted(set(group) - set(mine) - _OF_SCHEDULERS)
        if unknown:
            raise CheckpointError(
                f"{path}: the checkpoint has settings ({', '.join(unknown)}) that {type(optimizer).__name__} "
                "does not know: it is of an optimizer of another class"
            )


def _in_order(found: list[dict[str, Any]], count: int, path: str) -> list[dict[str, Any]]:
    """Which of the groups of one set of parameters (empty ones, mostly) the `count` groups here are.

    Raises: CheckpointError: that cannot be known, and they have different settings.
    """
    if count and len(found) != count:
        if any(canonical(one) != canonical(found[0]) for one in found):
            raise CheckpointError(
                f"{path}: {len(found)} groups of the checkpoint, with different settings, hold the same "
                f"parameters of those here (or none), and {count} groups do here: make as many groups as "
                "were saved"
            )
        return [found[0]] * count
    return list(found)


def write_optimizer(
    optimizer: Optimizer,
    names: dict[int, str],
    states: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Put loaded state (parameter -> state -> value) and settings in; state that was not saved is dropped."""
    own = states.get(OWN, {})
    if loads_itself(optimizer):
        load_by_its_methods(optimizer, names, states, groups, own)
        return
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)
        for parameter in group[_PARAMS]:
            if names[id(parameter)] in states:
                optimizer.state[parameter] = states[names[id(parameter)]]
            else:
                optimizer.state.pop(parameter, None)
    for name in own_state(optimizer):
        del optimizer.state[name]  # type: ignore[arg-type]
    optimizer.state.update(own)  # type: ignore[arg-type]
    after_load(optimizer)
