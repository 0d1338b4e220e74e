"""The text of a refusal: the op, each operand with its layout, why it cannot be, and a fix that was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement
from shardwright.plan.decide import plan_redistribution
from shardwright.rules.call import Call
from shardwright.rules.fix import Fix, onto_one_mesh, operand_names, tried_fixes


def scene(headline: str, operands: Mapping[str, object], marks: Mapping[str, str]) -> list[str]:
    """The headline and one line per operand, what is wrong with it behind an arrow."""
    width = max(map(len, operands), default=0)
    lines = [headline]
    for name, layout in operands.items():
        mark = f"   <- {marks[name]}" if name in marks else ""
        lines.append(f"  {name:<{width}}  {layout}{mark}")
    return lines


def implicit_text(call: Call, layouts: Sequence[Layout], wanted: Sequence[Layout], reason: str) -> str:
    """Why a call would communicate where `explicit()` allows none, and what to write in its place.

    Args: wanted: the layouts that the op would move its operands to. reason: the rule, for people.
    """
    names = operand_names(call)
    marks = {
        name: f"must become {want}: {_why(have, want)}"
        for name, have, want in zip(names, layouts, wanted, strict=True)
        if have != want and plan_redistribution(have, want).total_bytes
    }
    headline = f"{call.op.name()}: needs an implicit redistribution (explicit mode allows none): {reason}"
    lines = scene(headline, dict(zip(names, layouts, strict=True)), marks)
    return "\n".join([*lines, *_fix_lines(tried_fixes(call, layouts, wanted))])


def meshes_text(call: Call, layouts: Sequence[Layout]) -> str:
    """Why operands on different meshes have no common rule, and how to bring them onto one."""
    names = operand_names(call)
    said = {name: f"{layout} on {layout.mesh_shape!r}" for name, layout in zip(names, layouts, strict=True)}
    home = next((x for x in layouts if prod(x.shape) != 1), layouts[0]).mesh_shape  # numbers go to others
    marks = {
        name: "on another mesh"
        for name, layout in zip(names, layouts, strict=True)
        if layout.mesh_shape != home
    }
    lines = scene(f"{call.op.name()}: the operands live on different meshes", said, marks)
    return "\n".join([*lines, *_fix_lines(onto_one_mesh(call, layouts, home))])


def _fix_lines(fixes: tuple[Fix, ...] | None) -> list[str]:
    if not fixes:
        return ["  no fix found: no layout of the operands makes this call without communication"]
    width = max(len(fix.text) for fix in fixes)
    heads = ["fix (checked):", *["          and:"] * (len(fixes) - 1)]
    return [
        f"  {head}  {fix.text:<{width}}     {fix.bytes} B over all ranks"
        for head, fix in zip(heads, fixes, strict=True)
    ]


def _why(have: Layout, want: Layout) -> str:
    """What stands against the layout that an operand has."""
    found = [
        _why_on(axis, old, new)
        for axis, old, new in zip(have.axes, have.placements, want.placements, strict=True)
        if old != new and not old.is_replicated
    ]
    return "; ".join(found) or "the axes would cut it in another order"


def _why_on(axis: str, old: Placement, new: Placement) -> str:
    if old.is_pending:
        return f"not finished: each rank of {axis} holds only a term of it"
    if new.is_replicated:
        return f"the op needs it whole where {axis} cuts it"
    return f"{axis} cuts it in another way"
