"""`redistribute_many`: a list of DTensors moves with as few collectives as it has kinds of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from shardwright.comm.execute import execute_many
from shardwright.errors import LayoutError
from shardwright.plan.redistribution import plan_redistribution
from shardwright.tensor.autograd import acceptable_gradient
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.placements import PlacementsArgument, resolve_placements
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import wrap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwright.layout.layout import Layout


def redistribute_many(
    tensors: Sequence[DTensor], placements: PlacementsArgument | Sequence[PlacementsArgument]
) -> list[DTensor]:
    """The same values in other layouts, differentiable: one collective per kind of move and dtype.

    Args:
        tensors: DTensors; those of one mesh are packed together. All ranks pass the same list.
        placements: for every tensor alike (one per axis, or `{axis name: placement}`; axes not named stay as
            they are), or a list with one such entry per tensor.
    Returns: the tensors in the order given.
    Raises: LayoutError: as many entries as tensors are needed; what `DTensor.redistribute` refuses.
    Cost: the sum of the plans' bytes, in one message per kind where one by one would be many.
    """
    targets = [_target(x, given) for x, given in zip(tensors, _per_tensor(tensors, placements), strict=True)]
    results: list[DTensor | None] = [None] * len(tensors)
    for mesh, members in _by_mesh(tensors).items():
        moved = _Together.apply(mesh, [targets[i] for i in members], *(tensors[i] for i in members))  # type: ignore[no-untyped-call]
        for i, x in zip(members, moved, strict=True):
            results[i] = x
    return cast("list[DTensor]", results)


def _per_tensor(
    tensors: Sequence[DTensor], placements: PlacementsArgument | Sequence[PlacementsArgument]
) -> Sequence[PlacementsArgument]:
    nested = not isinstance(placements, Mapping) and any(
        isinstance(entry, Mapping | list | tuple) for entry in placements
    )
    if not nested:
        return [cast("PlacementsArgument", placements)] * len(tensors)
    if len(placements) != len(tensors):
        raise LayoutError(f"redistribute_many: {len(placements)} placements for {len(tensors)} tensors")
    return cast("Sequence[PlacementsArgument]", placements)


def _target(x: DTensor, given: PlacementsArgument) -> Layout:
    resolved, order = resolve_placements(x.device_mesh, given, default="layout", x=x)
    return x.layout.with_placements(resolved, order=order)


def _by_mesh(tensors: Sequence[DTensor]) -> dict[DeviceMesh, list[int]]:
    groups: dict[DeviceMesh, list[int]] = {}
    for index, x in enumerate(tensors):
        groups.setdefault(x.device_mesh, []).append(index)
    return groups


def _move(
    xs: Sequence[DTensor], targets: Sequence[Layout], mesh: DeviceMesh, reason: str
) -> list[torch.Tensor]:
    plans = [plan_redistribution(x.layout, target) for x, target in zip(xs, targets, strict=True)]
    return execute_many(plans, [x._local_tensor for x in xs], mesh, reason=reason)


class _Together(torch.autograd.Function):
    """DTensors -> DTensors of other layouts. Backward: the gradients travel together as well."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, targets: list[Layout], *xs: DTensor) -> tuple[DTensor, ...]:
        ctx.mesh, ctx.sources = mesh, [x.layout for x in xs]
        ctx.set_materialize_grads(False)
        moved = _move(xs, targets, mesh, "redistribute_many")
        fresh = [m.view_as(m) if m is x._local_tensor else m for m, x in zip(moved, xs, strict=True)]
        return tuple(
            wrap(local, spec_of(target, mesh, x._spec.use))
            for local, target, x in zip(fresh, targets, xs, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        given = [cast(DTensor, grads[i]) for i in present]
        targets = [acceptable_gradient(ctx.sources[i], g.layout) for i, g in zip(present, given, strict=True)]
        moved = _move(given, targets, ctx.mesh, "gradient of redistribute_many")
        results: list[Any] = [None] * len(grads)
        for i, local, target in zip(present, moved, targets, strict=True):
            results[i] = wrap(local, spec_of(target, ctx.mesh))
        return (None, None, *results)
