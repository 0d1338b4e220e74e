"""The state of an optimizer, keyed by parameter name and never by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.optim import Optimizer

from shardwright.checkpoint.manifest import SavedOptimizer, SavedTensor
from shardwright.checkpoint.model_state import describe
from shardwright.errors import CheckpointError

_COUNTER = "step"  # torch's optimizers keep it as a plain 0-d tensor, also beside a 0-d parameter


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer as data: (parameter, state name) -> tensor; other values; settings of each group."""

    kind: str
    tensors: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """A name for the set of parameters: ranks that share it share values and settings."""
        names = sorted(name for group in self.groups for name in group["params"])
        return str(xxhash.xxh3_64_hexdigest("\n".join(names).encode()))

    @property
    def identity(self) -> SavedOptimizer:
        """What the state is, without its data."""
        state: dict[str, dict[str, SavedTensor]] = {}
        for (parameter, name), tensor in self.tensors.items():
            state.setdefault(parameter, {})[name] = describe(tensor)
        return SavedOptimizer(kind=self.kind, state=state)


def parameters_of(optimizer: Optimizer, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """Name -> parameter, of all that the optimizer updates.

    Raises: CheckpointError: it updates a tensor that is no parameter of the model.
    """
    named: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"group {number} of the optimizer updates a tensor {list(parameter.shape)} that is no "
                    "parameter of the model: make the optimizer after the parameters have been placed"
                )
            named[names[id(parameter)]] = parameter
    return named


def read_optimizer(optimizer: Optimizer, names: dict[int, str]) -> OptimizerState:
    """The optimizer's state as the live objects.

    Args: names: identity of a parameter object -> its name.
    """
    state = OptimizerState(type(optimizer).__name__, groups=_groups(optimizer, names))
    for parameter, tensor in parameters_of(optimizer, names).items():
        for name, value in optimizer.state.get(tensor, {}).items():
            if isinstance(value, torch.Tensor):
                state.tensors[parameter, name] = value
            else:
                state.values.setdefault(parameter, {})[name] = value
    return state


def _groups(optimizer: Optimizer, names: dict[int, str]) -> list[dict[str, Any]]:
    """Each parameter group with names in place of parameters (an unknown one is refused elsewhere)."""
    return [
        {**group, "params": [names.get(id(one), "") for one in group["params"]]}
        for group in optimizer.param_groups
    ]


def make_room(
    optimizer: Optimizer, names: dict[int, str], saved: SavedOptimizer
) -> dict[tuple[str, str], torch.Tensor]:
    """An empty tensor for each saved state, laid out as the live one, else as its parameter. Changes nothing.

    Only for the parameters that this rank has.
    Raises: CheckpointError: another kind of optimizer, or a state whose layout cannot be known yet.
    """
    if saved.kind != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved.kind}, not of {type(optimizer).__name__}"
        )
    room: dict[tuple[str, str], torch.Tensor] = {}
    devices = _step_devices(optimizer)
    for parameter, tensor in parameters_of(optimizer, names).items():
        live = optimizer.state.get(tensor, {})
        for name, one in saved.state.get(parameter, {}).items():
            room[parameter, name] = _empty(
                f"{parameter}.{name}", one, tensor, live.get(name), devices[id(tensor)]
            )
    return room


def _empty(
    name: str, saved: SavedTensor, parameter: torch.Tensor, live: Any, device: torch.device
) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, saved.dtype.removeprefix("torch."))
    if isinstance(live, torch.Tensor) and tuple(live.shape) == saved.shape:
        return torch.zeros_like(live.detach(), dtype=dtype)
    if tuple(parameter.shape) == saved.shape and not name.endswith(f".{_COUNTER}"):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    if not saved.distributed:
        return torch.empty(saved.shape, dtype=dtype, device=device)
    raise CheckpointError(
        f"the optimizer's state {name} is {saved}, not the shape of its parameter, so how it lies here is "
        "not known before the optimizer has made it: take one step, then load"
    )


def _step_devices(optimizer: Optimizer) -> dict[int, torch.device]:
    """Where each parameter's counters live: on the CPU unless the group is fused or capturable."""
    cpu = torch.device("cpu")
    return {
        id(one): one.device if group.get("fused") or group.get("capturable") else cpu
        for group in optimizer.param_groups
        for one in group["params"]
    }


def check_groups(
    optimizer: Optimizer, names: dict[int, str], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The saved settings in the order of the groups here.

    Raises: CheckpointError: the parameters are grouped in another way.
    """
    mine = [frozenset(group["params"]) for group in _groups(optimizer, names)]
    held = frozenset().union(*mine)
    theirs = {frozenset(group["params"]) & held: group for group in saved}
    missing = next((group for group in mine if group not in theirs), None)
    if missing is not None:
        raise CheckpointError(
            f"the optimizer's groups differ: no group of the checkpoint holds just the {len(missing)} "
            f"parameters of {min(missing, default='an empty group')}'s group here"
        )
    return [theirs[group] for group in mine]


def write_optimizer(
    optimizer: Optimizer,
    names: dict[int, str],
    tensors: dict[tuple[str, str], torch.Tensor],
    values: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Put loaded state and settings into the optimizer; state that was not saved is dropped."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})
    loaded: dict[str, dict[str, Any]] = {name: dict(one) for name, one in values.items()}
    for (parameter, name), tensor in tensors.items():
        loaded.setdefault(parameter, {})[name] = tensor
    for parameter, tensor in parameters_of(optimizer, names).items():
        if parameter in loaded:
            optimizer.state[tensor] = loaded[parameter]
        else:
            optimizer.state.pop(tensor, None)
