"""Ops that write into a plain tensor, with DTensors beside it: they run on full values, and say so."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.comm.record import record_decision, recording
from shardwright.compat import tree_leaves, tree_map
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.placement.partial import Partial
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import by_name
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import refuse_moves
from shardwright.tensor.move import announce, move_asked, whole_unasked
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import up_to_date, wrap

_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_WHY = "is a gradient not finite on one of the ranks"


def write_into_plain(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The op on full values; DTensors that it writes too get their parts, and come back as they were given.

    torch's composed functions do so with a plain tensor of their own beside a DTensor of the user.
    """
    if func is _UNSCALE:
        args = (_unscale(*args), *args[1:])
        if not args[0]:
            return None
    if recording():
        record_decision(func.name(), "gather: a DTensor is written into a plain tensor")
    given = by_name(func, args, kwargs)
    full = {name: _whole(func, value) for name, value in given.items()}
    out = func(*list(full.values())[: len(args)], **{name: full[name] for name in kwargs})
    owners: dict[int, DTensor] = {}
    for argument in func._schema.arguments:
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write:
            pairs = zip(tree_leaves(given[argument.name]), tree_leaves(full[argument.name]), strict=True)
            owners |= {id(value): x for x, value in pairs if isinstance(x, DTensor)}
            _bring_back(owners, tree_leaves(full[argument.name]))
    return tree_map(lambda value: owners.get(id(value), value), out)


def _whole(func: Op, value: Any) -> Any:
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


def _unscale(gradients: list[torch.Tensor], found: torch.Tensor, scale: DTensor) -> list[DTensor]:
    """What a scaler of gradients does, on each rank's parts; whether one is not finite is all that is sent.

    Returns: the pending gradients, which are left: their terms may be finite where their sum is not.
    Cost: one number over each axis that cuts a gradient.
    """
    factor = scale._local_tensor
    here = [x for x in gradients if isinstance(x, DTensor) and x._spec.coords is not None]
    parts = [x for x in here if not x._spec.layout.pending_axes]
    by_mesh = {mesh: [x for x in parts if x.device_mesh is mesh] for mesh in (x.device_mesh for x in parts)}
    said = [(held, wrap(found.clone(), _told_by(held, found))) for held in by_mesh.values()]
    left = [x for x in here if x._spec.layout.pending_axes]
    for x in left:
        refuse_moves(_UNSCALE.name(), x, x._spec.layout.replicated(), _WHY)
    for _, flag in said:
        announce(_UNSCALE.name(), flag, flag._spec.layout.replicated(), _WHY)
    if plain := [x for x in gradients if not isinstance(x, DTensor)]:
        _UNSCALE(plain, found, factor)
    for held, flag in said:
        for x in held:
            up_to_date(x)
        local = flag._local_tensor.copy_(found)  # what another mesh found travels on
        _UNSCALE([x._local_tensor for x in held], local, factor)
        found.copy_(move_asked(flag, flag._spec.layout.replicated(), reason=f"{_UNSCALE.name()}: {_WHY}"))
    return left


def _told_by(held: list[DTensor], found: torch.Tensor) -> Spec:
    """The largest of what the ranks found that hold parts of these gradients."""
    mesh = held[0].device_mesh
    cut = [any(x._spec.layout.placements[i].is_partition for x in held) for i in range(mesh.ndim)]
    placements = tuple(Partial("max") if is_cut else Replicate() for is_cut in cut)
    return spec_of(Layout(mesh, placements, tuple(found.shape), dtype=found.dtype), mesh)
