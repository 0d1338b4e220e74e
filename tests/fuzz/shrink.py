"""The smallest program that still fails in the same way: fewer steps, plainer placements, smaller sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from tests.fuzz.placing import REVERSED
from tests.fuzz.program import Leaf, Program, Ref, renamed
from tests.fuzz.run import Plain, run
from tests.fuzz.sweep import Worlds
from tests.fuzz.verdicts import CRASH, OK, Verdict

_MOST = 250  # programs that one failure may cost


def shrink(program: Program, verdict: Verdict, worlds: Worlds) -> tuple[Program, Verdict]:
    """Greedy: take the first smaller program that fails alike, until there is none.

    A crash costs a world each time, so of those only a few are tried.
    """
    left = 15 if verdict.kind == CRASH else _MOST
    going = True
    while going and left > 0:
        going = False
        candidates = [c for c in _smaller(program) if _runs(c, verdict)]
        size = 1 if verdict.kind == CRASH else 8
        for at in range(0, len(candidates), size):
            some = candidates[at : at + size]
            left -= len(some)
            same = [(c, v) for c, v in _check(some, worlds) if v.kind == verdict.kind and _like(v, verdict)]
            if same:
                program, verdict = same[0]
                going = True
                break
            if left <= 0:
                break
    return program, verdict


def _check(programs: list[Program], worlds: Worlds) -> list[tuple[Program, Verdict]]:
    by_ranks: dict[int, list[Program]] = {}
    for program in programs:
        by_ranks.setdefault(prod(program.mesh), []).append(program)
    return [pair for some in by_ranks.values() for pair in worlds.check(some)]


def _like(one: Verdict, two: Verdict) -> bool:
    """Wrong is wrong; of errors the type and the beginning must agree."""
    return one.kind in {"wrong", CRASH} or one.sort.split(": ")[2:3] == two.sort.split(": ")[2:3]


def _runs(program: Program, verdict: Verdict) -> bool:
    """Does one device run it to its end (or raise in its last step, if that is what fails)?"""
    out = run(program, Plain())
    if out.error is None:
        return verdict.kind != "no error"
    return (
        out.step == len(program.steps) - 1
        and verdict.kind != "undue error"
        and not isinstance(out.error, KeyError)
    )


def _smaller(program: Program) -> Iterator[Program]:
    yield from _fewer_steps(program)
    if program.mesh != (2,):
        leaves = tuple(replace(leaf, placements=leaf.placements[:1]) for leaf in program.leaves)
        if not any(_needs(leaf, len(program.mesh)) for leaf in program.leaves):
            yield replace(program, mesh=(2,), leaves=leaves, steps=_on_one_axis(program))
            if len(program.mesh) == 2:
                others = tuple(replace(leaf, placements=leaf.placements[1:]) for leaf in program.leaves)
                yield replace(program, mesh=(2,), leaves=others, steps=_on_one_axis(program))
    yield from _plainer(program)


def _needs(leaf: Leaf, axes: int) -> bool:
    """A placement that names the axis's size."""
    return any(p.startswith(("Ragged", "Owner")) for p in leaf.placements) and axes == 1


def _on_one_axis(program: Program) -> tuple:
    return tuple(
        replace(s, args=(s.args[0], s.args[1][:1])) if s.call == "move" else s for s in program.steps
    )


def _fewer_steps(program: Program) -> Iterator[Program]:
    """From some step on; without one and what reads it; without flags."""
    count = len(program.steps)
    for end in (count // 2, count - 1):
        if 0 < end < count:
            yield _used(replace(program, steps=program.steps[:end]))
    for at in reversed(range(count)):
        gone = set(program.steps[at].outs)
        steps = list(program.steps[:at])
        for step in program.steps[at + 1 :]:
            if step.reads() & gone:
                gone |= set(step.outs)
            else:
                steps.append(step)
        yield _used(replace(program, steps=tuple(steps)))
    yield from _passed_over(program)
    for at, step in enumerate(program.steps):
        if not step.grad:
            steps = list(program.steps)
            steps[at] = replace(step, grad=True)
            yield replace(program, steps=tuple(steps))


def _passed_over(program: Program) -> Iterator[Program]:
    """Without one step, whose readers read its first operand."""
    for at, step in enumerate(program.steps):
        operand = next((a for a in step.args if isinstance(a, Ref)), None)
        if len(step.outs) == 1 and operand is not None and not step.many:
            rest = [renamed(s, step.outs[0], operand.name) for s in program.steps[at + 1 :]]
            yield _used(replace(program, steps=(*program.steps[:at], *rest)))


def _used(program: Program) -> Program:
    """Without leaves that no step reads."""
    read = {name for step in program.steps for name in step.reads()}
    return replace(program, leaves=tuple(leaf for leaf in program.leaves if leaf.name in read))


def _plainer(program: Program) -> Iterator[Program]:
    for at, leaf in enumerate(program.leaves):
        for other in _plainer_leaves(leaf):
            yield replace(program, leaves=(*program.leaves[:at], other, *program.leaves[at + 1 :]))
    sizes = sorted({size for leaf in program.leaves for size in leaf.shape if size > 2}, reverse=True)
    for size in sizes:
        yield replace(program, leaves=tuple(
            replace(leaf, shape=tuple(2 if n == size else n for n in leaf.shape)) for leaf in program.leaves
        ))  # fmt: skip


def _plainer_leaves(leaf: Leaf) -> Iterator[Leaf]:
    for axis, p in enumerate(leaf.placements):
        if p == REVERSED:
            yield replace(leaf, placements=leaf.placements[:axis])
            break
        for plain in ("Replicate()", "Shard(0)"):
            if p != plain and (plain == "Replicate()" or (leaf.shape and p != "Replicate()")):
                yield replace(leaf, placements=(*leaf.placements[:axis], plain, *leaf.placements[axis + 1 :]))
    if leaf.grad:
        yield replace(leaf, grad=False)
    if leaf.dtype in {"bfloat16", "float16", "float32"}:
        yield replace(leaf, dtype="float64")


__all__ = ["OK", "shrink"]
