"""The one mesh of a call whose operands live on a mesh and on slices of it.

A value of one element counts as a number there: it is the same on every rank that its mesh does not name, as
a plain tensor of one element beside a DTensor is. So it may go along on the mesh of the others; this is what
the norm of all gradients needs, the factor that scales each, and a loss on a slice beside a penalty on
parameters that data ranks share: each slice has the whole gradient of its own loss. Anything larger keeps its
mesh: on a slice, ranks of other rows may hold other rows of a batch, and nothing says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import current_graph_task_id, root_mesh, tree_map_only
from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import are_relatives, as_mesh_shape
from shardwright.placement.base import Placement, Replicate
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.refusal import meshes_text
from shardwright.tensor.dispatch.asked import Asked, are_together
from shardwright.tensor.dispatch.metadata import described_call
from shardwright.tensor.dispatch.ways.steps import Steps
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_unasked
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import CLASSES, wrap


def on_one_mesh(asked: Asked) -> Steps:
    """The call, whose operands live on several meshes, with its numbers on the mesh of the others.

    Raises: RuleError: operands of more than one element, or that are written, live on different meshes; it
        names the way out. Running it raises that for a number that wants a gradient and goes to a slice.
    """
    func, args, kwargs, tensors = asked.func, asked.args, asked.kwargs, asked.tensors
    mesh = _home(func, args, kwargs, tensors)
    if mesh is None:
        raise _refusal(func, args, kwargs, tensors)

    def run(*args: Any, **kwargs: Any) -> Any:
        home = mesh
        if func is _SUM and current_graph_task_id() != -1:  # of gradients of a number on a slice, of which
            home = min((x.device_mesh for x in args[:2]), key=_ndim)  # some may be that slice's own

        def bring(x: DTensor) -> DTensor:
            if as_mesh_shape(x.device_mesh) == as_mesh_shape(home):
                return x
            if x.requires_grad and torch.is_grad_enabled():
                if x.device_mesh.ndim > home.ndim:
                    raise _refusal(func, args, kwargs, tensors)
                _let_come_back(x)
            return _brought(func.name(), x, home)

        return func(*tree_map_only(CLASSES[0], bring, args), **tree_map_only(CLASSES[0], bring, kwargs))

    return Steps(run)


def _home(func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> DeviceMesh | None:
    """The mesh of what cannot go along; where all can, the smallest that all are slices of."""
    operands = described_call(func, args, kwargs).flat_operands
    fixed = [x for x, o in zip(tensors, operands, strict=True) if o.mutated or x.numel() != 1]
    if fixed and not are_together(fixed):
        return None
    found = [(fixed or tensors)[0].device_mesh]
    if not fixed:  # the largest, and what each is a slice of: slices of two may both belong to one of these
        found = [x.device_mesh for x in tensors]
        found = [max(found, key=lambda mesh: mesh.ndim), *map(root_mesh, found)]
    for mesh in found:
        if all(are_relatives(as_mesh_shape(x.device_mesh), as_mesh_shape(mesh)) for x in tensors):
            return mesh
    return None


def _brought(op: str, x: DTensor, mesh: DeviceMesh) -> DTensor:
    """The number on a larger mesh, where it is whole on the other axes, or on a slice of its own."""
    have, home = x._spec.layout, as_mesh_shape(mesh)
    kept = dict(zip(have.axes, have.placements, strict=True))
    finished = [kept[axis] if axis in home.axes else Replicate() for axis in have.axes]
    layout = have.with_placements(tuple(finished))
    local = move_unasked(op, x, layout, "a number goes to the mesh of the others")
    placements = tuple(kept.get(axis, Replicate()) for axis in home.axes)
    there = Layout(mesh, placements, have.shape, dtype=have.dtype, stride=have.stride)
    return wrap(local.detach(), spec_of(there, mesh))


def _ndim(mesh: DeviceMesh) -> int:
    return int(mesh.ndim)


def _let_come_back(x: DTensor) -> None:
    """Bring the gradient of a number home, from the larger mesh that it is computed with on.

    Below autograd, where this is asked, its graph is made already: what comes along it is seen by a hook.
    """
    if hasattr(x, _COMES_BACK):
        return
    setattr(x, _COMES_BACK, True)
    own, mesh, shape, stride = x._spec.layout, x.device_mesh, x.shape, x.stride()

    def home(gradient: Any) -> Any:
        if not isinstance(gradient, DTensor) or as_mesh_shape(gradient.device_mesh) == own.mesh_shape:
            return gradient
        have = gradient._spec.layout
        placed = dict(zip(have.axes, have.placements, strict=True))
        wanted: dict[str, Placement] = dict.fromkeys(have.axes, Replicate())
        for axis, p in zip(own.axes, own.placements, strict=True):
            term = p.is_replicated and placed[axis].is_partial("sum")
            wanted[axis] = placed[axis] if term else p.dual()
        local = gradient.redistribute(gradient.device_mesh, wanted).to_local()
        return DTensor.from_local(local, mesh, {a: wanted[a] for a in own.axes}, shape=shape, stride=stride)

    x.register_hook(home)  # type: ignore[no-untyped-call]


_SUM = torch.ops.aten.add.Tensor  # by which autograd adds gradients
_COMES_BACK = "_comes_back_from_a_larger_mesh"


def _refusal(func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> RuleError:
    return RuleError(meshes_text(described_call(func, args, kwargs), [x._spec.layout for x in tensors]))
