"""Run plans on the local tensors of this rank. It decides nothing: all ranks run the same plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import guard, traced
from shardwright.comm.async_result import Later
from shardwright.comm.program import Program, apart, program_of, seat_of
from shardwright.comm.traced import goes_in_groups, is_traced, refuse_between
from shardwright.plan.any_size import Sized
from shardwright.plan.by_axis import plans_by_axis
from shardwright.plan.plan import Plan
from shardwright.plan.work import Held, Seat


def execute(plan: Plan, local: Tensor, mesh: DeviceMesh | None, *, reason: str = "") -> Tensor:
    """The local tensor in the plan's target layout, from the one in its source layout. No autograd.

    Every rank of the mesh calls it (between two meshes: of both); a rank outside does nothing and gets
    `local` back, as all do where the plan has no steps. Else the result has memory of its own; `local` is
    never written.

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
    seat = seat_of(plan, mesh)
    if seat is None:
        return local
    if (plan.is_between or plan.crosses_several_axes) and _one_axis_at_a_time(plan, local):
        return _traced(plan, local, mesh, reason)
    if local.is_conj() or local.is_neg():
        local = _materialised(local)
    program = program_of(plan, mesh, seat, local, in_groups=goes_in_groups(local))
    return program.run(local, f"{reason}: {plan.reason}" if reason else plan.reason)


def execute_sized(
    plans: Sequence[Sized], local: Tensor, mesh: DeviceMesh, seat: Seat, *, reason: str
) -> Tensor:
    """As `execute` in a graph, of plans that follow one another. Raises: PlanError: as `execute`."""
    for sized in plans:
        program = Program(sized.plan, mesh, seat, in_groups=True, sized=sized)
        local = program.run(_materialised(local), f"{reason}: {sized.plan.reason}")
    return local


class Bound:
    """Runs one plan as `execute` does.

    It remembers the program for the device on which the last local tensor lay. A trace, and what a guard or
    a recording wants otherwise, go to `execute`.
    """

    __slots__ = ("_device", "_idle", "_mesh", "_program", "plan")

    def __init__(self, plan: Plan, mesh: DeviceMesh | None) -> None:
        self.plan, self._mesh = plan, mesh
        self._idle = not plan.steps
        self._program: Program | None = None
        self._device: torch.device | None = None

    def run(self, local: Tensor, reason: str) -> Tensor:
        """As `execute`, of a tensor whose conjugation or sign is carried out, not noted.

        Raises: PlanError: `local` has not the shape or dtype that the source layout says.
        """
        if self._idle:
            return local
        if guard.on or traced.blocks or type(local) is not Tensor:
            return execute(self.plan, local, self._mesh, reason=reason)
        program = self._program if local.device == self._device else self._on_device(local)
        if program is None:
            return local
        return program.run(local, f"{reason}: {self.plan.reason}" if reason else self.plan.reason)

    def _on_device(self, local: Tensor) -> Program | None:
        """The program for the device of a tensor; None on a rank that the plan does not know."""
        seat = seat_of(self.plan, self._mesh)
        self._program = (
            None if seat is None else program_of(self.plan, self._mesh, seat, local, in_groups=False)
        )
        self._device = local.device
        return self._program


def execute_later(plan: Plan, local: Tensor, mesh: DeviceMesh | None, *, reason: str = "") -> Tensor | Later:
    """As `execute`, but return once the last step that communicates has been posted; then `Later.wait()`.

    All ranks call it for the same plans in the same order. `local` may be written to at once. A plan
    without communication, one in pieces or a trace is run to its end.
    Raises: PlanError: as `execute`.
    """
    if guard.on and guard.must_compare(local):
        with guard.compared((plan,), reason):
            return execute_later(plan, local, mesh, reason=reason)
    seat = seat_of(plan, mesh)
    if seat is None:
        return local
    if goes_in_groups(local):
        return execute(plan, local, mesh, reason=reason)
    program = program_of(plan, mesh, seat, local, in_groups=False)
    return program.start(_materialised(local), f"{reason}: {plan.reason}" if reason else plan.reason)


def execute_many(
    plans: Sequence[Plan], locals_: Sequence[Tensor], mesh: DeviceMesh | None, *, reason: str = ""
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
    plans: Sequence[Plan], locals_: Sequence[Tensor], mesh: DeviceMesh | None, reason: str
) -> list[Tensor]:
    """Run plans of one form and dtype step by step, each collective once for all of them."""
    first = plans[0]
    if len(plans) == 1 or _one_axis_at_a_time(first, locals_[0]):
        pairs = zip(plans, locals_, strict=True)
        return [execute(plan, local, mesh, reason=reason) for plan, local in pairs]
    seat = seat_of(first, mesh)
    if seat is None:
        return list(locals_)
    programs = [program_of(plan, mesh, seat, locals_[0], in_groups=True) for plan in plans]
    held: list[Held] = [_given(program, local) for program, local in zip(programs, locals_, strict=True)]
    why = f"{reason}: {first.reason}" if reason else first.reason
    for tasks in zip(*(program.tasks for program in programs), strict=True):
        held = tasks[0].together(tasks, held, why)
    return list(map(apart, cast("list[Tensor]", held), locals_))


def _given(program: Program, local: Tensor) -> Tensor:
    program.refuse(local)
    return _materialised(local)


def _one_axis_at_a_time(plan: Plan, local: Tensor) -> bool:
    """Does the plan need messages between pairs of ranks that must not be sent here?"""
    if plan.is_between:
        return is_traced(local)
    return plan.crosses_several_axes and goes_in_groups(local)


def _traced(plan: Plan, local: Tensor, mesh: DeviceMesh | None, reason: str) -> Tensor:
    """One axis after the other: a traced graph cannot hold messages between pairs of ranks."""
    if plan.is_between:
        refuse_between(f"{plan.source!r} -> {plan.target!r}", local)
    for single in plans_by_axis(plan):
        local = execute(single, local, mesh, reason=f"{reason}: one axis at a time, in a traced graph")
    return local


def _materialised(x: Tensor) -> Tensor:
    """What is sent is memory: a conjugation or a sign that is only noted is carried out first."""
    return x.resolve_conj().resolve_neg()
