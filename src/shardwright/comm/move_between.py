"""What one rank does to its tensors beside sending them: room for results, its own elements, terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.pack import move, new_tensor, view_of
from shardwright.errors import PlacementError
from shardwright.index.overlap import Strided
from shardwright.placement.base import Pending
from shardwright.plan.carry import Carry, Side
from shardwright.plan.steps_between import Finish, Term


def room_for(x: Tensor, side: Side, step: Carry) -> Tensor:
    """The result before anything is in it; `x` itself if that is all of it."""
    if side.nothing:
        return x
    number = _filling(step.fill, x.dtype) if step.fill is not None and side.target.numel else None
    out = new_tensor(x, side.target)
    return out if number is None else out.fill_(number)


def keep_own(x: Tensor, out: Tensor, side: Side) -> None:
    """What `x` holds of the result, copied there."""
    if not side.nothing:
        move(x, out, side.keep)


def _filling(pending: Pending, dtype: torch.dtype) -> Any:
    """What the result holds where nothing arrives; a number, so that no second tensor is made."""
    identity = pending.identity(torch.empty((), dtype=dtype))
    return None if identity is None else identity.item()


def fitted(x: Tensor, step: Carry, rank: int) -> Tensor:
    """The result of a step once everything arrived.

    Raises: PlacementError: terms cannot be made of these values.
    """
    if step.fill is None or step.stacked or rank not in step.target.place_of:
        return x
    if not step.fill.in_domain(x):
        raise PlacementError(f"{step.fill} has no meaning for these values of {x.dtype}")
    return x if step.scale == 1 else x.mul_(step.scale)


def combined(x: Tensor, step: Finish, rank: int) -> Tensor:
    """The finished value from its terms, the last Pending first:  [q1 * q2 .., ...] -> [...].

    A rank that holds nothing calls no kernel.
    """
    if step.source.memory(rank).numel == 0:
        return x[0]
    parts = list(x.unbind(0))
    for pending, n in reversed(step.pendings):
        parts = [pending.combine(parts[i : i + n]) for i in range(0, len(parts), n)]
    return parts[0]


def embedded(x: Tensor, step: Term, rank: int) -> Tensor:
    """This rank's term of every Pending, the first one first."""
    for (pending, n), coord in zip(step.pendings, step.coords(rank), strict=False):
        x = pending.embed(x, n, coord)
    return x


PerPeer = tuple[tuple[int, tuple[Strided, ...]], ...]


def flat_views(tensors: Sequence[Tensor], sides: Sequence[PerPeer]) -> dict[int, list[Tensor]]:
    """For every peer the views of all tensors that go into, or come out of, one message with it; in order."""
    views: dict[int, list[Tensor]] = {}
    for x, side in zip(tensors, sides, strict=True):
        for peer, strided in side:
            views.setdefault(peer, []).extend(view_of(x, view) for view in strided)
    return views
