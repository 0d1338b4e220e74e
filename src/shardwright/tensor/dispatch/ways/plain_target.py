"""Ops that write into a plain tensor, with DTensors beside it: they run on full values, and say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.comm.record import record_decision, recording
from shardwright.compat import tree_leaves, tree_map
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import whole_unasked


def write_into_plain(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The op on full values; DTensors that it writes too get their parts, and come back as they were given.

    torch's composed functions do so with a plain tensor of their own beside a DTensor of the user.
    """
    if recording():
        record_decision(func.name(), "gather: a DTensor is written into a plain tensor")
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    full = {name: _whole(func, value) for name, value in given.items()}
    positional = [full[name] for name in names[: len(args)]]
    out = func(*positional, **{name: full[name] for name in kwargs})
    owners: dict[int, DTensor] = {}
    for argument in func._schema.arguments:
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write:
            pairs = zip(tree_leaves(given[argument.name]), tree_leaves(full[argument.name]), strict=True)
            owners |= {id(value): x for x, value in pairs if isinstance(x, DTensor)}
            _bring_back(owners, tree_leaves(full[argument.name]))
    return tree_map(lambda value: owners.get(id(value), value), out)


def _whole(func: torch._ops.OpOverload, value: Any) -> Any:
    if isinstance(value, DTensor):
        return whole_unasked(func.name(), value, "it meets a plain tensor that is written")
    if isinstance(value, list | tuple):
        return type(value)(_whole(func, v) for v in value)
    return value


def _bring_back(owners: dict[int, DTensor], values: list[torch.Tensor]) -> None:
    """Each rank takes its part of what was written; where it holds the whole there is nothing to do."""
    for value in values:
        owner = owners.get(id(value))
        coords = None if owner is None else owner._spec.coords
        if owner is not None and coords is not None and owner._local_tensor is not value:
            owner._local_tensor.copy_(owner._spec.layout.split(value, coords))
