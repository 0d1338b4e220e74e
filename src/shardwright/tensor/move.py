"""Moving the local tensor of a DTensor to another layout: the one place that plans and executes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.comm.execute import execute
from shardwright.comm.record import record_decision, recording
from shardwright.plan.decide import plan_redistribution
from shardwright.tensor.between import own_coords
from shardwright.tensor.expanded import base_of, bases
from shardwright.tensor.explicit_mode import refuse_moves
from shardwright.tensor.wrap import up_to_date

if TYPE_CHECKING:
    import torch

    from shardwright.layout.layout import Layout
    from shardwright.tensor.dtensor import DTensor


def move_local(x: DTensor, target: Layout, *, reason: str) -> torch.Tensor:
    """The local tensor that this rank holds once `x` has the layout `target` (the same object if it has it).

    Not differentiable: autograd lies above. Cost: what `plan_redistribution(sw.layout_of(x), target)` states.
    """
    source = x._spec.layout
    if source is target or source == target:
        return x._local_tensor
    local = x._local_tensor.resolve_conj().resolve_neg()  # what is sent are bytes, not flags
    small = bases(source, target)
    if small is None:
        return execute(plan_redistribution(source, target), local, x.device_mesh, reason=reason)
    base, why = base_of(local, source), f"{reason}: what it was expanded from"
    moved = execute(plan_redistribution(*small), base, x.device_mesh, reason=why)
    same = target.mesh_shape == source.mesh_shape
    coords = x._spec.coords if same else own_coords(target)
    return moved if coords is None else moved.expand(target.local_shape(coords))


def unasked(op: str, x: DTensor, target: Layout, why: str) -> None:
    """What the program did not write is said before it happens: refused inside `explicit()`, else recorded.

    Raises: ImplicitRedistributionError: inside `explicit()`, where the move would send something.
    """
    if x._spec.layout == target:
        return
    refuse_moves(op, x, target, why)
    if recording():
        record_decision(op, f"redistribute: {why}", f"{x._spec.layout} -> {target}")


def move_unasked(op: str, x: DTensor, target: Layout, why: str) -> torch.Tensor:
    """`move_local` that the op needs and the program did not write: refuse, record, move."""
    unasked(op, x, target, why)
    return move_local(x, target, reason=f"{op}: {why}")


def whole_unasked(op: str, x: DTensor, why: str) -> torch.Tensor:
    """All finished elements, which an op needs that the program did not write so: refuse, record, gather."""
    up_to_date(x)
    return move_unasked(op, x, x._spec.layout.replicated(), why)
