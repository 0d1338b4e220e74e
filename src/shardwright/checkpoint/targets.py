"""Where a checkpoint is loaded to: each tensor of the state with the key that it has in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint.collect import RANKS
from shardwright.checkpoint.compare import Wanted
from shardwright.checkpoint.model_state import read_model
from shardwright.checkpoint.optimizer_state import (
    OWN,
    check_groups,
    empty_state,
    own_state,
    parameters_of,
    placed_as_states,
    states_of,
    step_devices,
    write_optimizer,
)
from shardwright.checkpoint.shared_memory import Span, memory_of, span_of
from shardwright.checkpoint.state import Kind, Node
from shardwright.checkpoint.storage.element_types import DTYPES, name_of
from shardwright.checkpoint.storage.manifest import Manifest
from shardwright.checkpoint.storage.values import decode, kept_in
from shardwright.errors import CheckpointError

_TAG = "$"
VALUED = (Kind.GENERATOR, Kind.STATEFUL, Kind.VALUE)


@dataclass
class Targets:
    """What is loaded on this rank.

    Args: live: tensors of the state, by their names here, which are changed last of all.
        fresh: new tensors that nobody else has yet, by key of the checkpoint.
        ties: a further name here -> the name in `live`. twins: the tensors of these that are other objects.
        values: path -> what the checkpoint says, as JSON.
        objects: path -> the module that keeps this extra state.
        names: identity of a tensor -> all its names here. firsts: of what is one in memory, the first name
            that is loaded. spans: where tensors in `live` lie, as far as that was asked.
    """

    live: dict[str, torch.Tensor] = field(default_factory=dict)
    fresh: dict[str, torch.Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    twins: list[torch.Tensor] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, nn.Module] = field(default_factory=dict)
    names: dict[int, list[str]] = field(default_factory=dict)
    firsts: dict[Hashable, str] = field(default_factory=dict)
    spans: dict[str, Span | None] = field(default_factory=dict)
    optimizer_states: dict[str, dict[tuple[str, str], str]] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor, wanted: Wanted) -> None:
        """A tensor of the state."""
        self.names.setdefault(id(tensor), []).append(name)
        if not wanted(name):
            return
        span = span_of(tensor)
        first = self.firsts.setdefault(memory_of(tensor, span), name)
        if first == name:
            self.live[name], self.spans[name] = tensor, span
            return
        self.ties[name] = first
        if tensor is not self.live[first]:
            self.twins.append(tensor)

    def placed(self) -> Iterator[tuple[str, Span | None]]:
        """Where each tensor of the state lies."""
        for name, tensor in self.live.items():
            yield name, self.spans[name] if name in self.spans else span_of(tensor)

    def names_in(self, manifest: Manifest, path: str) -> dict[int, str]:
        """Identity of a tensor -> the name by which an optimizer of the checkpoint calls it.

        Of what is tied that may be another one than the first here.
        """
        saved = manifest.optimizers[path]
        known = {str(name) for group in saved.groups for name in group.get("params", ())}
        found = {}
        for tensor, names in self.names.items():
            theirs = [manifest.ties.get(name, name) for name in names]
            found[tensor] = next((name for name in theirs if name in known), theirs[0])
        return found


def tensors_of(nodes: list[Node], wanted: Wanted) -> Targets:
    """Where the tensors of a state's modules go. Nothing is changed.

    Args: wanted: whether a tensor or a value with this path is loaded.
    """
    found = Targets()
    for node in nodes:
        if node.kind is Kind.MODULE:
            state = read_model(node.live)
            for name, tensor in state.tensors.items():
                found.add(f"{node.path}/{name}", tensor, wanted)
            paths = {f"{node.path}/{name}": module for name, module in state.objects.items()}
            found.objects |= {path: module for path, module in paths.items() if wanted(path)}
        elif node.kind is Kind.TENSOR:
            found.add(node.path, node.live, wanted)
    return found


def add_others(found: Targets, nodes: list[Node], manifest: Manifest, *, rank: int, world: int) -> None:
    """Add where all else of a state goes. Nothing is changed.

    Args: nodes: those that are loaded.
    Raises: CheckpointError: an optimizer that does not fit; a value that each rank of another world saved.
    """
    for path in found.objects:
        _value(found, manifest, path, None, rank, world)
    for node in nodes:
        if node.kind is Kind.OPTIMIZER:
            _optimizer(found, manifest, node)
        elif node.kind in VALUED:
            like = node.live.state_dict() if node.kind is Kind.STATEFUL else node.live
            _value(found, manifest, node.path, like, rank, world)


def _value(found: Targets, manifest: Manifest, path: str, like: Any, rank: int, world: int) -> None:
    if path in manifest.values:
        found.values[path] = of_rank(manifest, path, rank, world)
        _kept(found, manifest, found.values[path], like)


def of_rank(manifest: Manifest, path: str, rank: int, world: int) -> Any:
    """A value as JSON: this rank's, where each rank saved its own.

    Raises: CheckpointError: it was saved by each rank of another world.
    """
    value = manifest.values[path]
    if not (isinstance(value, dict) and value.get(_TAG) == RANKS):
        return value
    own = value.get("v")
    if not isinstance(own, dict):
        raise CheckpointError(
            f"{path} is no value that was saved (of each rank one, and {own!r:.60} is of none)"
        )
    if manifest.world == world and str(rank) in own:
        return own[str(rank)]
    raise CheckpointError(
        f"{path} was saved by each of {manifest.world} ranks for itself, and there are {world} ranks "
        "here: which "
        "of them is meant cannot be known. Leave it out of the state, or give all ranks one value when saving"
    )


def _kept(
    found: Targets, manifest: Manifest, value: Any, like: Any, beside: tuple[str, torch.Tensor] | None = None
) -> None:
    """Room for the tensors that a value names: laid out as the one in its place here, else plain.

    Args: beside: the parameter, by its name in the checkpoint, of whose state the value is a part. A tensor
        there that was as the parameter was is whole on every rank of it, as its `new_empty` makes one.
    """
    saved_beside = beside and manifest.tensors.get(beside[0])
    for key, place in kept_in(value):
        saved = manifest.tensors.get(key)
        if saved is None:
            raise CheckpointError(f"{key} is named by a value and is no tensor of the checkpoint")
        here = _at(like, place)
        if isinstance(here, torch.Tensor) and tuple(here.shape) == saved.shape:
            found.fresh[key] = torch.zeros_like(here.detach(), dtype=DTYPES[saved.dtype])
        elif beside and saved_beside and saved.distributed == saved_beside.distributed:
            found.fresh[key] = beside[1].detach().new_empty(saved.shape, dtype=DTYPES[saved.dtype])
        elif saved.distributed:
            raise CheckpointError(f"{key} is {saved}, and there is no tensor like it here to say how it lies")
        else:
            found.fresh[key] = torch.empty(saved.shape, dtype=DTYPES[saved.dtype], device="cpu")


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _optimizer(found: Targets, manifest: Manifest, node: Node) -> None:
    saved = manifest.optimizers.get(node.path)
    if saved is None:
        raise CheckpointError(
            f"the checkpoint holds no optimizer state called {node.path}: load it without one"
        )
    names = found.names_in(manifest, node.path)
    parameters = parameters_of(node.live, names, node.path)
    devices = step_devices(node.live)
    check_groups(node.live, names, saved, node.path)
    states = states_of(node.path, manifest.tensors, set(parameters))
    for (parameter, name), key in states.items():
        tensor, there = parameters[parameter], manifest.tensors[key]
        here = node.live.state.get(tensor, {}).get(name)
        if not isinstance(here, torch.Tensor) or tuple(here.shape) != there.shape:
            beside = manifest.tensors.get(parameter)
            found.fresh[key] = empty_state(key, there, beside, tensor, devices[id(tensor)])
        elif name_of(here.dtype) == there.dtype:
            found.live[key] = here
        else:
            found.fresh[key] = torch.zeros_like(here.detach(), dtype=DTYPES[there.dtype])
    for parameter, values in saved.values.items():
        if parameter in parameters:
            mine = parameters[parameter]
            _kept(found, manifest, values, node.live.state.get(mine, {}), (parameter, mine))
    _kept(found, manifest, saved.values.get(OWN), own_state(node.live))
    found.optimizer_states[node.path] = states


def prepared(
    found: Targets, manifest: Manifest, node: Node, loaded: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """What puts a loaded optimizer in place, when everything that could be wrong with it has been tried.

    Raises: CheckpointError: a setting or a value is none that was saved.
    """
    saved = manifest.optimizers[node.path]
    names, take = found.names_in(manifest, node.path), loaded.__getitem__
    here = {OWN, *names.values()}
    states: dict[str, dict[str, Any]] = {
        parameter: decode(values, parameter, take)
        for parameter, values in saved.values.items()
        if parameter in here
    }
    for parameter, tensor in parameters_of(node.live, names, node.path).items():
        beside = manifest.tensors.get(parameter)
        if parameter in states:
            as_parameter = beside is not None and not beside.distributed
            states[parameter] = placed_as_states(states[parameter], tensor, as_parameter=as_parameter)
    for (parameter, name), key in found.optimizer_states[node.path].items():
        states.setdefault(parameter, {})[name] = loaded[key]
    groups = check_groups(node.live, names, saved, node.path)
    return partial(write_optimizer, node.live, names, states, groups)
