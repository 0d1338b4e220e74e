"""The steps of a plan that need nobody else."""

from __future__ import annotations

from math import prod

from torch import Tensor

from shardwright.comm.pack import in_memory, move, new_tensor
from shardwright.plan.holders import Coords
from shardwright.plan.pending import AxisPending
from shardwright.plan.steps import Embed, Place
from shardwright.plan.transfer import Move


def take(x: Tensor, moved: Move) -> Tensor:
    """The part of `x` that the target map keeps, copied; `x` itself when that is all of it."""
    x = in_memory(x, moved.source)
    if moved.nothing:
        return x
    out = new_tensor(x, moved.target)
    move(x, out, moved.views)
    return out


def place(x: Tensor, step: Place, moved: Move, sizes: tuple[int, ...]) -> Tensor:
    """The own part in a tensor that is the identity of the Pendings elsewhere."""
    out = _identity(new_tensor(x, moved.target), step.pendings)
    # An average divides by the size of the axis, whatever the other ranks hold.
    scale = prod(sizes[axis] for axis, pending in step.pendings if pending.reduce_op == "avg")
    x = in_memory(x, moved.source)
    move(x if scale == 1 else x * scale, out, moved.views)
    return out


def _identity(empty: Tensor, pendings: tuple[AxisPending, ...]) -> Tensor:
    filled = pendings[0][1].identity(empty)
    return empty if filled is None else filled


def embed(x: Tensor, step: Embed, coords: Coords, sizes: tuple[int, ...]) -> Tensor:
    """This rank's term of every Pending of the step, the first one first."""
    for axis, pending in step.pendings:
        x = pending.embed(x, sizes[axis], coords[axis])
    return x
