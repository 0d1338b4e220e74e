"""Run a plan on the local tensor of this rank. It decides nothing: all ranks run the same plan."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm import functional
from shardwright.comm.guard import check_same_plan, guarding
from shardwright.comm.local_steps import combine, embed, place, take
from shardwright.comm.packing import in_memory, pack, pack_once, unpack
from shardwright.comm.wires import GroupWire, wire_for
from shardwright.errors import PlanError
from shardwright.plan.maps import Coords
from shardwright.plan.plan import Plan
from shardwright.plan.steps import AllReduce, Combine, Embed, Exchange, LocalMove, Step
from shardwright.plan.transfer import Transfer, transfer


def execute(plan: Plan, local: Tensor, mesh: DeviceMesh, *, reason: str = "") -> Tensor:
    """The local tensor in the plan's target layout, from the one in its source layout. No autograd.

    Every rank of the mesh calls it; a rank outside does nothing and gets `local` back. The result may be
    `local` itself when nothing changes; `local` is never written.

    Args:
        plan: from `plan_redistribution`, equal on all ranks.
        local: this rank's local tensor; it may be empty or strided in any way.
        mesh: the mesh of the plan's layouts.
        reason: what the record shall say about each collective; default: the plan's own reason.

    Raises:
        PlanError: `local` has not the shape or dtype that the source layout says.
    """
    if guarding():
        check_same_plan(plan, mesh)
    if not plan.steps:
        return local
    position = mesh.get_coordinate()
    if position is None:
        return local
    coords = tuple(position)
    _check(plan, local, coords)
    why = f"{reason}: {plan.reason}" if reason else plan.reason
    for step in plan.steps:
        local = _run(step, plan, local, mesh, coords, why)
    return local


def _check(plan: Plan, local: Tensor, coords: Coords) -> None:
    layout = plan.source
    if local.dtype != layout.dtype or tuple(local.shape) != layout.local_shape(coords):
        raise PlanError(
            f"a local tensor of {local.dtype} {tuple(local.shape)} is not that of {layout} at {coords}: "
            f"expected {layout.dtype} {layout.local_shape(coords)}"
        )


def _run(step: Step, plan: Plan, local: Tensor, mesh: DeviceMesh, coords: Coords, why: str) -> Tensor:
    sizes = plan.source.sizes
    if isinstance(step, Exchange):
        return _exchange(step, plan, local, mesh, coords, why)
    if isinstance(step, AllReduce):
        axis = plan.source.axes[step.axis]
        return functional.reduce_over(local, step.op, mesh.get_group(step.axis), axis=axis, reason=why)
    if isinstance(step, LocalMove):
        return take(local, step, coords)
    if isinstance(step, Combine):
        return combine(local, step, sizes)
    return embed(local, step, coords, sizes) if isinstance(step, Embed) else place(local, step, coords, sizes)


def _exchange(
    step: Exchange, plan: Plan, local: Tensor, mesh: DeviceMesh, coords: Coords, why: str
) -> Tensor:
    wire = wire_for(step, plan, mesh, coords)
    table = _table(step, plan, coords, wire.members)
    local = in_memory(local, table.source)
    if step.gather and isinstance(wire, GroupWire):
        received = wire.gather(pack_once(local, table, wire.members.index(coords)), why)
    elif len(wire.members) == 1:
        received = pack(local, table)
    else:
        received = wire.exchange(pack(local, table), table.receive_counts, table.send_counts, why)
    return unpack(received, local, table)


def _table(step: Exchange, plan: Plan, coords: Coords, members: tuple[Coords, ...]) -> Transfer:
    """This rank's side of the step, made once per plan."""
    key = (coords, plan.steps.index(step))
    known = plan.for_rank.get(key)
    if isinstance(known, Transfer) and known.members == members:
        return known
    made = transfer(step, coords, members)
    plan.for_rank[key] = made
    return made
