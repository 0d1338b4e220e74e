"""Run plans on the local tensors of this rank. It decides nothing: all ranks run the same plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import guard
from shardwright.comm.async_result import Later
from shardwright.comm.execute_between import run_between
from shardwright.comm.runner import Runner
from shardwright.comm.traced import is_traced, refuse_between
from shardwright.errors import PlanError
from shardwright.plan.by_axis import plans_by_axis
from shardwright.plan.holders import Coords
from shardwright.plan.plan import Plan
from shardwright.plan.plan_between import PlanBetween


def execute(plan: Plan, local: Tensor, mesh: DeviceMesh, *, reason: str = "") -> Tensor:
    """The local tensor in the plan's target layout, from the one in its source layout. No autograd.

    Every rank of the mesh calls it (between two meshes: of both); a rank outside does nothing and gets
    `local` back. The result may be
    `local` itself when nothing changes; `local` is never written.

    Args:
        plan: from `plan_redistribution`, equal on all ranks.
        local: this rank's local tensor; it may be empty or strided in any way.
        mesh: the mesh of the plan's layouts (between two meshes: the source's; it is not used).
        reason: what the record says about each collective, before the plan's own reason.

    Raises:
        PlanError: `local` has not the shape or dtype that the source layout says.
    """
    if guard.on and guard.must_compare(local):
        with guard.compared((plan,), reason):
            return execute(plan, local, mesh, reason=reason)
    return _together((plan,), (local,), mesh, reason)[0]


def execute_later(plan: Plan, local: Tensor, mesh: DeviceMesh, *, reason: str = "") -> Tensor | Later:
    """As `execute`, but return once the last step that communicates has been posted; then `Later.wait()`.

    All ranks call it for the same plans in the same order. `local` may be written to at once. A plan
    without communication, one in pieces or a trace is run to its end.
    Raises: PlanError: as `execute`.
    """
    if guard.on and guard.must_compare(local):
        with guard.compared((plan,), reason):
            return execute_later(plan, local, mesh, reason=reason)
    position = mesh.get_coordinate() if plan.steps else None
    if position is None:
        return local
    local = _materialised(local)
    _check(plan, local, tuple(position))
    if is_traced(local):
        return execute(plan, local, mesh, reason=reason)
    why = f"{reason}: {plan.reason}" if reason else plan.reason
    return Runner((plan,), mesh, tuple(position), why).start(local)


def execute_many(
    plans: Sequence[Plan], locals_: Sequence[Tensor], mesh: DeviceMesh, *, reason: str = ""
) -> list[Tensor]:
    """Run one plan per tensor, with one collective for all tensors whose plans have the same form.

    The plans have the same form when their steps are of the same kinds over the same axes; tensors are
    packed together if their dtypes are equal too. All ranks pass the same plans in the same order.
    Raises: PlanError: as `execute`.
    """
    if guard.on and guard.must_compare(*locals_):
        with guard.compared(plans, reason):
            return execute_many(plans, locals_, mesh, reason=reason)
    results = list(locals_)
    groups: dict[object, list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault((plan.form, plan.source.dtype), []).append(i)
    for members in groups.values():
        done = _together([plans[i] for i in members], [locals_[i] for i in members], mesh, reason)
        for i, result in zip(members, done, strict=True):
            results[i] = result
    return results


def _together(
    plans: Sequence[Plan], locals_: Sequence[Tensor], mesh: DeviceMesh, reason: str
) -> list[Tensor]:
    """Run plans of one form and dtype step by step, each collective once for all of them."""
    locals_ = [_materialised(local) for local in locals_]
    first = plans[0]
    if isinstance(first, PlanBetween):
        return _between(plans, locals_, reason)
    position = mesh.get_coordinate() if first.steps else None
    if position is None:
        return list(locals_)
    coords = tuple(position)
    for plan, local in zip(plans, locals_, strict=True):
        _check(plan, local, coords)
    if first.crosses_several_axes and is_traced(locals_[0]):
        return _by_axis(plans, locals_, mesh, reason)
    why = f"{reason}: {first.reason}" if reason else first.reason
    return Runner(plans, mesh, coords, why).run(locals_)


def _between(plans: Sequence[Plan], locals_: Sequence[Tensor], reason: str) -> list[Tensor]:
    first = plans[0]
    for local in locals_:
        refuse_between(f"{first.source!r} -> {first.target!r}", local)
    why = f"{reason}: {first.reason}" if reason else first.reason
    return run_between(cast("Sequence[PlanBetween]", plans), locals_, why)


def _by_axis(plans: Sequence[Plan], locals_: Sequence[Tensor], mesh: DeviceMesh, reason: str) -> list[Tensor]:
    results: list[Tensor] = []
    for plan, given in zip(plans, locals_, strict=True):
        local = given
        for single in plans_by_axis(plan):
            local = execute(single, local, mesh, reason=f"{reason}: one axis at a time, in a traced graph")
        results.append(local)
    return results


def _materialised(x: Tensor) -> Tensor:
    """What is sent is memory: a conjugation or a sign that is only noted is carried out first."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def _check(plan: Plan, local: Tensor, coords: Coords) -> None:
    layout = plan.source
    if local.dtype != layout.dtype or tuple(local.shape) != layout.local_shape(coords):
        raise PlanError(
            f"a local tensor of {local.dtype} {tuple(local.shape)} is not that of {layout} at {coords}: "
            f"expected {layout.dtype} {layout.local_shape(coords)}"
        )
