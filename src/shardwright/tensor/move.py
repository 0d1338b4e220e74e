"""The one door through which elements move: refused where nobody asked for it, recorded, sent.

Nothing else in this layer plans and executes, but for lists (`move_many.py`) and what is sent while the
program goes on (`under_way.py`), both of which the program wrote. `lint-imports` says so.
"""

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
    from collections.abc import Callable, Sequence

    import torch

    from shardwright.layout.layout import Layout
    from shardwright.tensor.dtensor import DTensor


def move_asked(x: DTensor, target: Layout, *, reason: str) -> torch.Tensor:
    """What this rank holds once `x` has the layout `target`: the program wrote it, or it was announced.

    What an algorithm moves while it runs was refused and recorded with the algorithm.

    The local tensor of `x` itself if it has that layout. Not differentiable: autograd lies above. Cost: what
    `plan_redistribution(sw.layout_of(x), target)` states.
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


def move_operands(
    op: str,
    wanted: Sequence[tuple[DTensor, Layout]],
    why: str,
    *,
    refuse: Callable[[], None] | None = None,
    kind: str = "redistribute",
) -> list[torch.Tensor]:
    """The local tensors of an op's operands in the layouts that it needs: refuse, record, move.

    Args:
        op: its name.
        wanted: operands and their layouts.
        why: for people.
        refuse: raises in the op's own words inside `explicit()`, for all operands at once; without it each
            operand is refused alone.
        kind: what the record calls it.
    Raises: ImplicitRedistributionError: inside `explicit()`, before anything is sent.
    """
    if refuse is not None:
        refuse()
    else:
        for x, target in wanted:
            refuse_moves(op, x, target, why)
    moved = []
    for x, target in wanted:
        if recording() and x._spec.layout != target:
            record_decision(op, f"{kind}: {why}", f"{x._spec.layout} -> {target}")
        moved.append(move_asked(x, target, reason=f"{op}: {why}"))
    return moved


def move_unasked(op: str, x: DTensor, target: Layout, why: str) -> torch.Tensor:
    """`move_operands` of one operand."""
    return move_operands(op, [(x, target)], why)[0]


def move_in_algorithm(algorithm: str, x: DTensor, target: Layout, why: str) -> torch.Tensor:
    """What an algorithm moves while it runs: the record is that of the algorithm.

    Raises: ImplicitRedistributionError: inside `explicit()`, before anything is sent.
    """
    refuse_moves(algorithm, x, target, why)
    return move_asked(x, target, reason=algorithm)


def whole_unasked(op: str, x: DTensor, why: str) -> torch.Tensor:
    """All finished elements, which an op needs that the program did not write so: refuse, record, gather."""
    up_to_date(x)
    return move_unasked(op, x, x._spec.layout.replicated(), why)


def announce(op: str, x: DTensor, target: Layout, why: str) -> None:
    """Refuse and record a move that comes later, before anything is changed.

    Raises: ImplicitRedistributionError: inside `explicit()`, where the move would send something.
    """
    if x._spec.layout == target:
        return
    refuse_moves(op, x, target, why)
    if recording():
        record_decision(op, f"redistribute: {why}", f"{x._spec.layout} -> {target}")
