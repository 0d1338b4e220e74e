"""Run plans between two meshes: messages between pairs of ranks of the default group, no other group.

All ranks of both meshes call it with the same plans in the same order; a rank that is in neither returns at
once. The order of messages follows from the plan alone, so no two ranks can disagree about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.move_between import combined, embedded, fitted, flat_views, keep_own, room_for
from shardwright.comm.pack import in_memory, move, new_tensor
from shardwright.comm.peers import Mail, receive, send
from shardwright.errors import PlanError
from shardwright.plan.carry import Carry, Side
from shardwright.plan.plan_between import PlanBetween
from shardwright.plan.steps_between import Between, Finish, Slabs, Term

# Where a step stands in its plan: (index), or (index, piece, index in the piece).
Key = tuple[int, ...]


def run_between(plans: Sequence[PlanBetween], locals_: Sequence[Tensor], reason: str) -> list[Tensor]:
    """The local tensors in the plans' target layouts; plans of one form and dtype share messages.

    Raises: PlanError: a mesh has ranks that this world has not, or a local tensor is not the layout's.
    """
    first = plans[0]
    rank = dist.get_rank()
    _check_world(first)
    if rank not in first.ranks:
        return list(locals_)
    for plan, local in zip(plans, locals_, strict=True):
        _check_local(plan, local, rank)
    return _Run(plans, rank, reason).steps((), [plan.steps for plan in plans], list(locals_))


def _check_world(plan: PlanBetween) -> None:
    world = dist.get_world_size()
    outside = [rank for rank in plan.ranks if not 0 <= rank < world]
    if outside:
        raise PlanError(
            f"{plan.source!r} -> {plan.target!r}: rank {outside[0]} is outside this world of {world} ranks"
        )


def _check_local(plan: PlanBetween, local: Tensor, rank: int) -> None:
    layout = plan.source
    if rank not in layout.ranks:
        return
    coords = layout.coords_of(rank)
    if local.dtype != layout.dtype or tuple(local.shape) != layout.local_shape(coords):
        raise PlanError(
            f"a local tensor of {local.dtype} {tuple(local.shape)} is not that of {layout} at {coords}: "
            f"expected {layout.dtype} {layout.local_shape(coords)}"
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of plans of one form on this rank. why: what the record says about its messages."""

    plans: Sequence[PlanBetween]
    rank: int
    why: str

    def steps(self, key: Key, steps_of: Sequence[Sequence[Between]], held: list[Tensor]) -> list[Tensor]:
        for index in range(len(steps_of[0])):
            held = self._step((*key, index), [steps[index] for steps in steps_of], held)
        return held

    def _step(self, key: Key, steps: Sequence[Between], held: list[Tensor]) -> list[Tensor]:
        if isinstance(steps[0], Carry):
            return self._carry(key, cast("Sequence[Carry]", steps), held)
        if isinstance(steps[0], Slabs):
            return [self._in_pieces(key, steps[0], held[0])]
        return [self._alone(step, x) for step, x in zip(steps, held, strict=True)]

    def _alone(self, step: Between, x: Tensor) -> Tensor:
        if isinstance(step, Finish):
            return combined(x, step, self.rank)
        return embedded(x, cast("Term", step), self.rank)

    def _in_pieces(self, key: Key, step: Slabs, x: Tensor) -> Tensor:
        out = new_tensor(x, step.target.memory(self.rank))
        for piece, steps in enumerate(step.parts):
            done = self.steps((*key, piece), [steps], [x])[0]
            move(done, out, step.views(piece, self.rank))
            del done  # else it is held while the next piece moves
        return out

    def _carry(self, key: Key, steps: Sequence[Carry], held: list[Tensor]) -> list[Tensor]:
        sides = [self._side(key, plan, step) for plan, step in zip(self.plans, steps, strict=True)]
        held = [in_memory(x, side.source) for x, side in zip(held, sides, strict=True)]
        results = [room_for(x, side, step) for x, side, step in zip(held, sides, steps, strict=True)]
        mail = Mail(
            outgoing=flat_views(held, [side.sends for side in sides]),
            incoming=flat_views(results, [side.receives for side in sides]),
        )
        first = self.plans[0]
        names = " -> ".join(_axes(layout.axes) for layout in (first.source, first.target))
        travelling = send(mail, held[0].dtype, axis=names, reason=self.why)
        for x, out, side in zip(held, results, sides, strict=True):
            keep_own(x, out, side)
        receive(travelling)
        del travelling, mail  # the messages are not held any longer
        return [fitted(x, step, self.rank) for x, step in zip(results, steps, strict=True)]

    def _side(self, key: Key, plan: PlanBetween, step: Carry) -> Side:
        """This rank's side of a step, made once per plan."""
        known = plan.for_rank.get((self.rank, key))
        if not isinstance(known, Side):
            known = plan.for_rank[self.rank, key] = step.side(self.rank)
        return known


def _axes(names: tuple[str, ...]) -> str:
    return f"({', '.join(names)})"
