"""The state of a run as a tree of live objects: what each is, and by which path it is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.errors import CheckpointError

_DEPTH = 32
_RESERVED = {"rng", "extra"}
_ARGUMENTS = {"only", "in_place", "step", "config", "format"}  # of `save`, `async_save` or `load`


class Kind(Enum):
    """What is done with an object."""

    MODULE = auto()
    OPTIMIZER = auto()
    GENERATOR = auto()
    TENSOR = auto()
    STATEFUL = auto()
    VALUE = auto()


class Node(NamedTuple):
    """One object of the tree; `path` has a slash for each level."""

    path: str
    kind: Kind
    live: Any


def nodes_of(state: Mapping[str, Any]) -> list[Node]:
    """The objects of a state, its dicts, lists and tuples followed down to what they hold.

    A container with nothing alive in it is one plain value.
    Raises: CheckpointError: a name with a slash or that is taken, an object inside itself.
    """
    _refuse_no_state(state)
    taken = _RESERVED & set(state)
    if taken:
        raise CheckpointError(f"a state cannot be called {min(taken)!r}: the checkpoint has one of its own")
    if taken := _ARGUMENTS & set(state):
        raise CheckpointError(
            f"a state cannot be called {min(taken)!r}, which is an argument of `save` or `load` (not of this "
            "function): give it another name"
        )
    return [node for name, value in state.items() for node in _walk(_name(name), value, 0)]


def _refuse_no_state(state: Mapping[str, Any]) -> None:
    """Refuse what `model=` and `optimizer=` cannot mean: plain values, and the one for the other."""
    for name, other, kind in (("model", "optimizer", Kind.OPTIMIZER), ("optimizer", "model", Kind.MODULE)):
        value = state.get(name, ())
        if _kind(value) is kind:
            raise CheckpointError(f"{name}= is {value!r:.60}, which is given as {other}=")
        empty = isinstance(value, dict | list | tuple) and not value
        if _kind(value) is Kind.VALUE and not (empty or _holds_live(value, 0)):
            raise CheckpointError(
                f"{name}={value!r:.60} holds no module, tensor or optimizer: a plain value has a name of its "
                "own (save(..., best=0.5))"
            )


def given(model: Any, optimizer: Any) -> dict[str, Any]:
    """The two that have names of their own, by these; None is one that there is not."""
    return {name: one for name, one in (("model", model), ("optimizer", optimizer)) if one is not None}


def _walk(path: str, value: Any, depth: int) -> Iterator[Node]:
    if depth > _DEPTH:
        raise CheckpointError(f"{path} is nested deeper than {_DEPTH}: is it inside itself?")
    kind = _kind(value)
    if kind is not Kind.VALUE or not _holds_live(value, depth):
        yield Node(path, kind, value)
    elif isinstance(value, dict):
        _refuse_twins(path, value)
        for name, one in value.items():
            yield from _walk(f"{path}/{_name(name)}", one, depth + 1)
    else:
        for at, one in enumerate(value):
            yield from _walk(f"{path}/{at}", one, depth + 1)


def _refuse_twins(path: str, value: dict[Any, Any]) -> None:
    seen: set[str] = set()
    for name in map(_name, value):
        if name in seen:
            raise CheckpointError(f"{path} has two states called {name!r}: one is named by a number")
        seen.add(name)


def _name(name: Any) -> str:
    if not isinstance(name, str | int) or "/" in str(name) or str(name) == "":
        raise CheckpointError(f"a state is named {name!r}: a name is text or a number, without a slash")
    return str(name)


def _kind(value: Any) -> Kind:
    if isinstance(value, nn.Module):
        return Kind.MODULE
    if isinstance(value, Optimizer):
        return Kind.OPTIMIZER
    if isinstance(value, torch.Generator):
        return Kind.GENERATOR
    if isinstance(value, torch.Tensor):
        return Kind.TENSOR
    if not isinstance(value, type) and _has_state(value):
        return Kind.STATEFUL
    return Kind.VALUE


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _holds_live(value: Any, depth: int) -> bool:
    """Whether a container holds, at any level, an object that is loaded in place."""
    if depth > _DEPTH or not isinstance(value, dict | list | tuple):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return any(_kind(one) is not Kind.VALUE or _holds_live(one, depth + 1) for one in inner)
