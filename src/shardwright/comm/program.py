"""A plan bound to this rank: its steps as tasks, made when the plan first runs here and kept with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.async_result import Later
from shardwright.comm.collective import Exchanging, Reducing
from shardwright.comm.mailbox import Mailing, Posted
from shardwright.comm.task import Applying, Moving, Piecewise, Task, run_all
from shardwright.errors import PlanError
from shardwright.plan.any_size import Sized
from shardwright.plan.plan import Plan
from shardwright.plan.work import Apply, Held, InPieces, Move, Reduction, Seat, Transfer, Work

# From this many bytes per rank on, messages between pairs of ranks are faster on gloo than its collectives:
# where several ranks want the same or terms are combined, for a collective needs that repeated, and packed
# in buffers; and where nothing is repeated. Below, one collective has the lower and steadier latency.
STRAIGHT_BYTES = 256 * 1024
STRAIGHT_BYTES_UNREPEATED = 4 * 1024 * 1024


class Program:
    """The tasks of one rank. in_groups: whatever has a process group uses it. sized: for symbols."""

    def __init__(
        self, plan: Plan, mesh: DeviceMesh | None, seat: Seat, *, in_groups: bool, sized: Sized | None = None
    ) -> None:
        self.plan, self.mesh, self.seat, self.in_groups = plan, mesh, seat, in_groups
        self.dtype = plan.source.dtype
        self.shape = _local_shape(plan, seat) if sized is None else torch.Size(sized.shape)
        works = [step.work(seat) for step in plan.steps] if sized is None else sized.works
        self.tasks = list(map(self.task, works))

    def task(self, work: Work) -> Task:
        """What runs a work."""
        return _TASKS[type(work)](self, work)

    def run(self, local: Tensor, why: str) -> Tensor:
        """All tasks on one local tensor."""
        if local.shape != self.shape or local.dtype != self.dtype:
            self.refuse(local)
        held: Held = local
        for task in self.tasks:
            held = task.run(held, why)
        moved = cast("Tensor", held)
        if type(moved) is Tensor and moved.untyped_storage()._cdata == local.untyped_storage()._cdata:
            return moved.clone()  # as `apart`, without a call at each move
        return moved

    def start(self, local: Tensor, why: str) -> Tensor | Later:
        """As `run`, but return once the last task that sends has posted what it sends.

        That is copied first: `local` may be written to before the result is waited for.
        """
        last = max((i for i, task in enumerate(self.tasks) if task.sends), default=None)
        if last is None or isinstance(self.tasks[last], Piecewise):
            return self.run(local, why)
        self.refuse(local)
        finish = self.tasks[last].start(run_all(self.tasks[:last], local, why), why)
        parts = finish.parts() if isinstance(finish, Posted) and last + 1 == len(self.tasks) else ()
        return Later(lambda: run_all(self.tasks[last + 1 :], finish(), why), parts)

    def refuse(self, local: Tensor) -> None:
        """Raises: PlanError: `local` is not what the source layout says; a rank outside has nothing."""
        if self.shape is not None and (local.shape != self.shape or local.dtype != self.dtype):
            at = self.seat if isinstance(self.seat, tuple) else self.plan.source.coords_of(self.seat)
            raise PlanError(
                f"a local tensor of {local.dtype} {tuple(local.shape)} is not that of {self.plan.source} at "
                f"{at}: expected {self.dtype} {tuple(self.shape)}"
            )

    def group(self, axis: int) -> ProcessGroup:
        """The process group of an axis.

        Raises: PlanError: a step between two meshes asks for one.
        """
        if self.mesh is None or self.plan.is_between:
            raise PlanError("a step between two meshes has no process group: it sends between pairs of ranks")
        return self.mesh.get_group(axis)

    def goes_straight(self, work: Transfer) -> bool:
        """Messages between pairs of ranks, without the group of an axis? All ranks decide alike."""
        if len(work.axes) != 1 or work.kept.filling is not None:
            return True
        per_rank = work.moved * self.dtype.itemsize // len(self.plan.ranks)
        least = STRAIGHT_BYTES if work.repeated else STRAIGHT_BYTES_UNREPEATED
        return not self.in_groups and per_rank >= least


def apart(moved: Tensor, local: Tensor) -> Tensor:
    """What was moved, in memory of its own: on the other ranks it is, for a part may be the whole on one.

    A write into it would reach the source there, and part what all ranks hold.
    """
    if type(moved) is Tensor and moved.untyped_storage()._cdata == local.untyped_storage()._cdata:
        return moved.clone()
    return moved


def _local_shape(plan: Plan, seat: Seat) -> torch.Size | None:
    """What the rank must hold of the source; None: nothing, and nobody looks at what it gives."""
    if isinstance(seat, int):
        if seat not in plan.source.ranks:
            return None
        seat = plan.source.coords_of(seat)
    return torch.Size(plan.source.local_shape(seat))


def _transferring(program: Program, work: Transfer) -> Task:
    if program.goes_straight(work):
        return Mailing(work, program.plan)
    return Exchanging(work, program.plan, program.group(work.axes[0]))


def _piecewise(program: Program, work: InPieces) -> Task:
    pieces = [([program.task(each) for each in works], move) for works, move in work.pieces]
    return Piecewise(work.target, pieces)


_TASKS: dict[type, Callable[[Program, Any], Task]] = {
    Move: lambda _, work: Moving(work),
    Apply: lambda _, work: Applying(work),
    Reduction: lambda program, work: Reducing(work, program.plan, program.group(work.axis)),
    Transfer: _transferring,
    InPieces: _piecewise,
}


def program_of(plan: Plan, mesh: DeviceMesh | None, seat: Seat, like: Tensor, *, in_groups: bool) -> Program:
    """The program of this rank for tensors like this one.

    Made once per plan and mesh: two meshes may have one shape.
    in_groups: they go through process groups, wherever they lie: several that are packed, or see `traced`.
    """
    key = seat, like.device.type, in_groups
    known = plan.for_rank.get(key)
    if isinstance(known, Program) and known.mesh is mesh:
        return known
    made = plan.for_rank[key] = Program(plan, mesh, seat, in_groups=in_groups or _on_accelerator(like))
    return made


def _on_accelerator(like: Tensor) -> bool:
    """Where it lies; without data, in a rehearsal, where a tensor of this machine would."""
    return torch.accelerator.is_available() if like.is_meta else like.device.type != "cpu"


def seat_of(plan: Plan, mesh: DeviceMesh | None) -> Seat | None:
    """Where this rank stands in a plan; None: it is in no mesh of it, or there is nothing to do.

    Raises: PlanError: a mesh has ranks that this world has not.
    """
    if not plan.steps:
        return None
    if plan.is_between:
        return _rank_in(plan)
    position = mesh.get_coordinate() if mesh is not None else None
    return None if position is None else tuple(position)


def _rank_in(plan: Plan) -> int | None:
    world, rank = dist.get_world_size(), dist.get_rank()
    outside = [each for each in plan.ranks if not 0 <= each < world]
    if outside:
        raise PlanError(
            f"{plan.source!r} -> {plan.target!r}: rank {outside[0]} is outside this world of {world} ranks; "
            "name ranks that were started"
        )
    return rank if rank in plan.ranks else None
