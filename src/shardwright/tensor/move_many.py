"""A list of DTensors moves with as few collectives as it has kinds of moves: `redistribute_many`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Placement as TorchPlacement

from shardwright.comm.execute import execute_many
from shardwright.errors import LayoutError, as_several
from shardwright.layout.layout import Layout
from shardwright.plan.decide import plan_together
from shardwright.tensor.autograd import acceptable_gradient, differentiated, redistributed, wrap_gradient
from shardwright.tensor.between import layout_on
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import announce
from shardwright.tensor.placements import PlacementsArgument, mesh_and_placements
from shardwright.tensor.redistribution import unmoved
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_ours, wrap

# For all tensors alike, or an entry for each: in order, or by name.
PlacementsForMany = PlacementsArgument | Sequence[PlacementsArgument] | Mapping[str, PlacementsArgument]


@overload
def redistribute_many(
    tensors: Sequence[DTensor],
    device_mesh: DeviceMesh | PlacementsForMany | None = None,
    placements: PlacementsForMany | None = None,
) -> list[DTensor]: ...


@overload
def redistribute_many(
    tensors: Mapping[str, DTensor],
    device_mesh: DeviceMesh | PlacementsForMany | None = None,
    placements: PlacementsForMany | None = None,
) -> dict[str, DTensor]: ...


def redistribute_many(
    tensors: Sequence[DTensor] | Mapping[str, DTensor],
    device_mesh: DeviceMesh | PlacementsForMany | None = None,
    placements: PlacementsForMany | None = None,
) -> list[DTensor] | dict[str, DTensor]:
    """The same values in other layouts, differentiable: one collective per kind of move and dtype.

    Args:
        tensors: DTensors, or a state dict of them; those that go between the same meshes are packed together.
            All ranks pass the same ones, a list in the same order.
        device_mesh: the mesh they go to; their own if it is left out (it may be, as in `redistribute`).
        placements: for every tensor alike (one per axis, or `{axis name: placement}`; axes not named stay as
            they are), or a list with one such entry per tensor, or `{name: entry}` for a state dict.
    Returns: the tensors in the order given, or by name.
    Raises: LayoutError: as many entries as tensors are needed; what `DTensor.redistribute` refuses.
    Cost: the sum of the plans' bytes, in one message per kind where one by one would be many. The messages of
        all tensors are held at once: twice the parts of this rank at most. In a compiled graph: one by one.
    """
    if issubclass(type(tensors), torch.Tensor):
        raise LayoutError(
            "redistribute_many takes a list or dict of DTensors, got one: x.redistribute moves it"
        )
    mesh, each = mesh_and_placements("redistribute_many", device_mesh, placements)
    named: Any = tensors.values() if isinstance(tensors, Mapping) else tensors
    names, fix = None, "a list or a dict of DTensors"
    given = as_several("redistribute_many: tensors", named, LayoutError, fix=fix)
    if isinstance(tensors, Mapping):
        names = list(tensors)
    listed = [_ours(x, repr(names[i]) if names else f"tensor {i}") for i, x in enumerate(given)]
    entries = _per_tensor(listed, names, each)
    if names is None:
        return _moved(listed, mesh, entries)
    order = sorted(range(len(names)), key=lambda i: str(names[i]))
    moved = _moved([listed[i] for i in order], mesh, [entries[i] for i in order])
    by_name = {names[i]: x for i, x in zip(order, moved, strict=True)}
    return {name: by_name[name] for name in names}


def _moved(
    tensors: Sequence[DTensor], mesh: DeviceMesh | None, placements: Sequence[PlacementsArgument]
) -> list[DTensor]:
    if torch.compiler.is_compiling():  # a graph holds the calls, and the moves are planned when it is traced
        return [x.redistribute(mesh, given) for x, given in zip(tensors, placements, strict=True)]
    homes = [x.device_mesh if mesh is None else mesh for x in tensors]
    targets = [layout_on(x, home, p) for x, home, p in zip(tensors, homes, placements, strict=True)]
    results: list[DTensor | None] = [
        unmoved(x) if x.device_mesh == home and x._spec.layout == target else None
        for x, home, target in zip(tensors, homes, targets, strict=True)
    ]
    left = [i for i, x in enumerate(results) if x is None]
    for (_, home), places in _by_meshes([tensors[i] for i in left], [homes[i] for i in left]).items():
        members = [left[place] for place in places]
        moved = redistributed_together([tensors[i] for i in members], [targets[i] for i in members], home)
        for i, x in zip(members, moved, strict=True):
            results[i] = x
    return cast("list[DTensor]", results)


def redistributed_together(
    xs: Sequence[DTensor], targets: Sequence[Layout], mesh: DeviceMesh
) -> Sequence[DTensor]:
    """DTensors of one mesh in these layouts on a mesh, differentiable. Cost: that of `redistribute_many`."""
    if torch.compiler.is_compiling():
        return [redistributed(x, target, mesh) for x, target in zip(xs, targets, strict=True)]
    return cast("tuple[DTensor, ...]", _Together.apply(mesh, targets, *xs))  # type: ignore[no-untyped-call]


def _ours(x: object, name: str) -> DTensor:
    """A DTensor of this library; torch's own is made one, if no gradient is asked of it."""
    if isinstance(x, DTensor):
        return x
    if isinstance(x, TorchDTensor) and not x.requires_grad:
        return as_ours(x)
    if isinstance(x, TorchDTensor):
        raise LayoutError(f"redistribute_many: {name} is torch's own DTensor and needs a gradient: detach it")
    raise LayoutError(
        f"redistribute_many: {name} is a {type(x).__name__}, not a DTensor: place it with "
        "sw.distribute_tensor first, or leave it out"
    )


def _per_tensor(
    tensors: Sequence[DTensor], names: Sequence[str] | None, placements: PlacementsForMany
) -> Sequence[PlacementsArgument]:
    given = placements.values() if isinstance(placements, Mapping) else placements
    fix = "one placement for each axis, {axis name: placement}, or such an entry for each tensor"
    several = () if isinstance(given, TorchPlacement) else given
    entries = as_several("redistribute_many: placements", several, LayoutError, fix=fix)
    if not any(isinstance(entry, Mapping | list | tuple) for entry in entries):
        return [cast("PlacementsArgument", placements)] * len(tensors)
    if isinstance(placements, Mapping):
        return _by_name(names, cast("Mapping[str, PlacementsArgument]", placements))
    if len(entries) != len(tensors):
        raise LayoutError(f"redistribute_many: {len(entries)} placements for {len(tensors)} tensors")
    return cast("Sequence[PlacementsArgument]", entries)


def _by_name(
    names: Sequence[str] | None, placements: Mapping[str, PlacementsArgument]
) -> Sequence[PlacementsArgument]:
    if names is None:
        raise LayoutError("redistribute_many: placements by name are for a state dict, not for a list")
    for these, those, what in (
        (names, placements, "has no placements"),
        (placements, names, "is not in the state dict"),
    ):
        missing = [name for name in these if name not in those]
        if missing:
            raise LayoutError(f"redistribute_many: {missing[0]!r} {what}")
    return [placements[name] for name in names]


def _by_meshes(
    tensors: Sequence[DTensor], homes: Sequence[DeviceMesh]
) -> dict[tuple[DeviceMesh, DeviceMesh], list[int]]:
    groups: dict[tuple[DeviceMesh, DeviceMesh], list[int]] = {}
    for index, (x, home) in enumerate(zip(tensors, homes, strict=True)):
        groups.setdefault((x.device_mesh, home), []).append(index)
    return groups


def move_operands_together(op: str, wanted: Sequence[tuple[DTensor, Layout]], why: str) -> list[torch.Tensor]:
    """`move.move_operands` of tensors on any meshes, in as few collectives as they have kinds of moves."""
    for x, target in wanted:
        announce(op, x, target, why)
    results: dict[int, torch.Tensor] = {}
    for members in _by_meshes([x for x, _ in wanted], [x.device_mesh for x, _ in wanted]).values():
        xs, targets = zip(*(wanted[i] for i in members), strict=True)
        results.update(zip(members, _move(xs, targets, f"{op}: {why}"), strict=True))
    return [results[i] for i in range(len(wanted))]


def _move(xs: Sequence[DTensor], targets: Sequence[Layout], reason: str) -> list[torch.Tensor]:
    """The local tensors of the targets; the tensors are on one mesh, the targets on one."""
    plans = plan_together((x._spec.layout, target) for x, target in zip(xs, targets, strict=True))
    if not plans:
        return []
    return execute_many(plans, [x._local_tensor for x in xs], xs[0].device_mesh, reason=reason)


class _Together(torch.autograd.Function):
    """DTensors of one mesh -> DTensors on `mesh`. Backward: the gradients travel together as well."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, targets: Sequence[Layout], *xs: DTensor) -> tuple[DTensor, ...]:
        ctx.mesh, ctx.sources = xs[0].device_mesh, [x._spec.layout for x in xs]
        ctx.set_materialize_grads(False)
        moved = _move(xs, targets, "redistribute_many")
        fresh = [m.view_as(m) if m is x._local_tensor else m for m, x in zip(moved, xs, strict=True)]
        return tuple(
            wrap(local, spec_of(target, mesh, x._spec.use if mesh == ctx.mesh else None))
            for local, target, x in zip(fresh, targets, xs, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[Any, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        given = [cast(DTensor, grads[i]) for i in present]
        targets = [
            acceptable_gradient(ctx.sources[i], g._spec.layout) for i, g in zip(present, given, strict=True)
        ]
        results: list[Any] = [None] * len(grads)
        if any(differentiated(grad) for grad in given):
            moved = _Together.apply(ctx.mesh, targets, *given)  # type: ignore[no-untyped-call]
        else:
            locals_ = _move(given, targets, "gradient of redistribute_many")
            moved = [
                wrap_gradient(x, spec_of(target, ctx.mesh), grad)
                for x, target, grad in zip(locals_, targets, given, strict=True)
            ]
        for i, x in zip(present, moved, strict=True):
            results[i] = x
        return (None, None, *results)
