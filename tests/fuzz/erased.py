"""A program as an erased function: recorded on other values than those that are compared, then replayed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.fuzz.program import Leaf, Program
from tests.fuzz.run import Env, OnMesh, Outcome, Plain, execute, run

_TURNS = 2  # before the one that is compared: what torch or Python make once is there for the second


def run_erased(program: Program, mesh: DeviceMesh) -> Outcome:
    """The last of a few calls; what it wrote is not said, for a replay has no steps. Errors name no step.

    A backward at the end of every other program is that of the results, outside of what is erased.
    """
    device, inside, outside = OnMesh(mesh), program.steps, program.steps[:0]
    backwards = [number for number, step in enumerate(inside) if "backward" in step.call]
    if program.seed % 2 and backwards == [len(inside) - 1]:
        inside, outside, backwards = inside[:-1], inside[-1:], []
    detached = bool(backwards)

    def steps(leaves: Env) -> Env:
        env = dict(leaves)
        for step in inside:
            execute(step, env, device)
        made = {name: value for name, value in env.items() if name not in leaves}
        return {name: _detached(value) for name, value in made.items()} if detached else made

    def whole(leaves: Env) -> Env:
        env = leaves | fast(leaves)
        for step in outside:
            execute(step, env, device)
        return env

    other = [
        replace(program, leaves=tuple(_other(x, turn) for x in program.leaves)) for turn in range(_TURNS)
    ]
    fast, out = sw.erase(steps), Outcome(step=len(program.steps) - 1, detached=detached)
    try:
        for drawn in [*other, program]:
            # Where one device raises for other values, the program's own are taken.
            can = drawn is program or run(drawn, Plain()).error is None
            out.env = whole(_placed((drawn if can else program).leaves, device))
    except Exception as error:  # noqa: BLE001 - what a program raises is its answer
        out.error = error
    out.replayed = fast.report().replays > 0
    return out


def _placed(leaves: tuple[Leaf, ...], device: OnMesh) -> Env:
    return {leaf.name: device.leaf(leaf) for leaf in leaves}


def _other(leaf: Leaf, turn: int) -> Leaf:
    return replace(leaf, seed=leaf.seed + 7919 * (turn + 1))


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value
