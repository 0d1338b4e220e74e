"""What to redistribute so that a call needs no communication: proposed, then tried by propagation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Placement, Replicate
from shardwright.plan.decide import plan_redistribution
from shardwright.rules.call import Call
from shardwright.rules.propagate import propagate

_REPLICATE = Replicate()


@dataclass(frozen=True, slots=True)
class Fix:
    """One operand in another layout. `bytes`: what that moves, over all ranks."""

    operand: int
    name: str
    target: Layout
    text: str
    bytes: int


def operand_names(call: Call) -> tuple[str, ...]:
    """What the op's schema calls the tensors of a call; `tensors[1]` in a list."""
    return tuple(
        operand.name if operand.position is None else f"{operand.name}[{operand.position}]"
        for operand in call.flat_operands
    )


def tried_fixes(call: Call, layouts: Sequence[Layout], wanted: Sequence[Layout]) -> tuple[Fix, ...] | None:
    """The operands to redistribute, in layouts with which the call was propagated and moves nothing.

    Tried in this order: `wanted` for operands whose move to it costs something; `wanted` for all; all whole.
    Returns: None where none of these will do.
    Communication: none.
    """
    for targets in _proposals(tuple(layouts), tuple(wanted)):
        if _runs_as_it_is(call, targets):
            names = operand_names(call)
            return tuple(
                fix_of(i, names[i], have, want)
                for i, (have, want) in enumerate(zip(layouts, targets, strict=True))
                if have != want
            )
    return None


def fix_of(operand: int, name: str, have: Layout, want: Layout) -> Fix:
    """The redistribution of one operand, as a line of a program and with what it moves."""
    cost = plan_redistribution(have, want).total_bytes
    return Fix(operand, name, want, f"{name}.redistribute({_arguments(have, want)})", cost)


def _proposals(have: tuple[Layout, ...], want: tuple[Layout, ...]) -> Iterator[tuple[Layout, ...]]:
    costly = tuple(
        new if old != new and plan_redistribution(old, new).total_bytes else old
        for old, new in zip(have, want, strict=True)
    )
    whole = tuple(x.replicated() for x in have)
    yield from dict.fromkeys((costly, want, whole))


def _runs_as_it_is(call: Call, layouts: tuple[Layout, ...]) -> bool:
    decision = propagate(call, layouts)
    if decision.rewrites:
        return False
    pairs = zip(layouts, decision.inputs, strict=True)
    return all(have == want or not plan_redistribution(have, want).total_bytes for have, want in pairs)


def _arguments(have: Layout, want: Layout) -> str:
    """The axes that change, as a mapping; all placements and the order where a mapping does not say it."""
    changed = {
        axis: new
        for axis, old, new in zip(have.axes, have.placements, want.placements, strict=True)
        if old != new
    }
    if have.with_placements(changed) == want:
        return mapping_code(changed)
    listed = ", ".join(code(placement) for placement in want.placements)
    order = ", ".join(f'"{axis}"' for axis in want.order_names)
    return f"[{listed}], order=({order})"


def mapping_code(placements: Mapping[str, Placement]) -> str:
    """The expression that names the axes and their placements."""
    return "{" + ", ".join(f'"{axis}": {code(placement)}' for axis, placement in placements.items()) + "}"


def code(placement: Placement) -> str:
    """The expression that makes a placement."""
    reduce_op = getattr(placement, "reduce_op", "")
    if placement.is_pending and placement.text() == f"{type(placement).__name__}({reduce_op})":
        return f'{type(placement).__name__}("{reduce_op}")'
    return placement.text()


def onto_one_mesh(call: Call, layouts: Sequence[Layout], mesh: MeshShape) -> tuple[Fix, ...] | None:
    """The operands that live on other meshes, redistributed onto `mesh`, with which the call was propagated.

    Tried: placed like the operand of the same shape that is there; whole. A number may be a plain tensor.
    Returns: None if neither will do, or where one mesh is of some ranks of the other: nothing goes there.
    """
    if any(_is_part(x.mesh_shape, mesh) for x in layouts if prod(x.shape) != 1):
        return None
    there = [layout for layout in layouts if layout.mesh_shape == mesh]
    names = operand_names(call)
    for like in (True, False):
        targets = tuple(x if x.mesh_shape == mesh else _on_mesh(x, mesh, there, like=like) for x in layouts)
        if _runs_as_it_is(call, targets):
            first = names[next(i for i, x in enumerate(layouts) if x.mesh_shape == mesh)]
            return tuple(
                _moved_mesh(i, names[i], first, have, want)
                for i, (have, want) in enumerate(zip(layouts, targets, strict=True))
                if have != want
            )
    return None


def _is_part(one: MeshShape, other: MeshShape) -> bool:
    """Is one of them of some ranks of the other, as a slice is?"""
    here, there = set(one.ranks), set(other.ranks)
    return here < there or there < here


def _on_mesh(layout: Layout, mesh: MeshShape, there: list[Layout], *, like: bool) -> Layout:
    same = [x.placements for x in there if x.shape == layout.shape and not x.pending_axes]
    placements = same[0] if same and like else (_REPLICATE,) * len(mesh.axes)
    return Layout(mesh, placements, layout.shape, dtype=layout.dtype, stride=layout.stride)


def _moved_mesh(operand: int, name: str, first: str, have: Layout, want: Layout) -> Fix:
    if prod(have.shape) == 1:
        whole = have.with_placements((_REPLICATE,) * len(have.axes))
        return Fix(operand, name, want, f"{name}.full_tensor()", plan_redistribution(have, whole).total_bytes)
    cost = plan_redistribution(have, want).total_bytes
    listed = mapping_code(dict(zip(want.axes, want.placements, strict=True)))
    return Fix(operand, name, want, f"{name}.redistribute({first}.device_mesh, {listed})", cost)
