"""A program as a compiled function of its leaves; a backward that follows is that of its results, outside."""

from __future__ import annotations

import linecache
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from tests.fuzz.placing import REVERSED
from tests.fuzz.program import Leaf, Program, Ref, Step
from tests.fuzz.run import Device, Env, Outcome, Plain, execute, run, tensors
from tests.ops.modes import MODES, WITHOUT_GRADIENTS

BACKENDS = ("", "eager", "aot_eager", "inductor")
# What docs/limits.md says of compiled graphs: errors of torch for a write into a view that is no slices,
# and for a backward of an argument which was written.
_TOLD = (
    "as_strided() is non-compositional",
    "ANY output aliasing (even for regular tensors) is currently unsupported",
    "Expected: None (type <class 'torch.Tensor'>)",
)


def prepared(program: Program, backend: str) -> Program:
    """The program up to the first step that no graph holds; if it has no backward there, one is added."""
    held = list(takewhile(_is_held, program.steps))
    ending = program.steps[len(held) : len(held) + 1]
    cut = replace(program, steps=tuple(held), compiled=backend)
    if ending and ending[0].form == "backward":
        return replace(cut, steps=(*held, *ending))
    return _with_backward(cut) if program.under not in WITHOUT_GRADIENTS else cut


def _is_held(step: Step) -> bool:
    """Not what asks autograd, which a function does outside of what it has compiled."""
    return step.form not in {"backward", "grad"} and step.call not in {"hook", ".requires_grad_", ".grad"}


def _with_backward(program: Program) -> Program:
    """Of all results that want one."""
    made = {name for step in program.steps for name in step.outs}
    wanted = run(program, Plain())
    if wanted.error is not None:
        return program
    results = [(name, x) for name, x in tensors(wanted.env) if name in made and _is_followed(x)]
    weights = tuple(_weight(f"x{1000 + at}", x, program) for at, (_, x) in enumerate(results))
    given = [Ref(name) for name, _ in results], [Ref(leaf.name) for leaf in weights]
    ending = Step((), "torch.autograd.backward", given, form="backward")
    return replace(
        program, leaves=program.leaves + weights, steps=(*program.steps, *[ending] * bool(results))
    )


def _is_followed(x: torch.Tensor) -> bool:
    try:
        return x.requires_grad and not x.is_leaf
    except RuntimeError:  # a view made without gradients, its base written with them
        return False


def _weight(name: str, x: torch.Tensor, program: Program) -> Leaf:
    dtype = str(x.dtype).removeprefix("torch.")
    return Leaf(name, tuple(x.shape), dtype, ("Replicate()",) * len(program.mesh), "normal", program.seed)


def run_compiled(program: Program, device: Device) -> Outcome:
    """The last of its calls. Errors name no step, and nobody says which step wrote.

    Of three programs one was called before on other values, one on other layouts: what is compiled is found
    again, or compiled anew.
    """
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # why graphs break, and how kernels were tried
    torch._dynamo.reset()
    inside = tuple(takewhile(_is_held, program.steps))
    steps = torch.compile(function_of(inside, program.leaves), backend=program.compiled)
    out = Outcome(step=len(program.steps) - 1)
    try:
        for drawn in (*_before(program), program):
            leaves = {leaf.name: device.leaf(leaf) for leaf in drawn.leaves}
            with MODES[program.under]():
                out.env = leaves | steps(*leaves.values(), device.move)
                for step in program.steps[len(inside) :]:
                    execute(step, out.env, device)
    except Exception as error:  # noqa: BLE001 - what a program raises is its answer
        out.error = error
    return out


def _before(program: Program) -> list[Program]:
    """What is called first, if one device takes it."""
    other = (_of_other_values, _of_other_layouts, None)[program.seed % 3]
    if other is None:
        return []
    drawn = replace(program, leaves=tuple(map(other, program.leaves)))
    return [drawn] if run(drawn, Plain()).error is None else []


def _of_other_values(leaf: Leaf) -> Leaf:
    return replace(leaf, seed=leaf.seed + 7919)


def _of_other_layouts(leaf: Leaf) -> Leaf:
    return replace(leaf, placements=tuple("Replicate()" for text in leaf.placements if text != REVERSED))


def function_of(steps: tuple[Step, ...], leaves: tuple[Leaf, ...]) -> Callable[..., Env]:
    """The steps as one function of the leaves and of what moves a tensor; it returns the variables made."""
    made = [name for step in steps for name in step.outs]
    lines = [
        f"def steps({', '.join([leaf.name for leaf in leaves] + ['move'])}):",
        *(f"    {step.source()}" for step in steps),
        f"    return {{{', '.join(f'{name!r}: {name}' for name in made)}}}",
    ]
    text = "\n".join(lines) + "\n"
    file = f"<steps {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(text, file, "exec"), names)  # noqa: S102 - written by this package
    function = names["steps"]
    assert callable(function)
    return function


def is_told(error: Exception | None) -> bool:
    """Is it an error that the documents say of compiled programs?"""
    return error is not None and any(text in str(error) for text in _TOLD)


def one_device_fails_too(program: Program, wanted: Outcome) -> bool:
    """Does torch's compiler, without a mesh, raise or give other values than the program as it is?"""
    got = run_compiled(program, Plain())
    if got.error is not None or wanted.error is not None:
        return True
    alike = all(_alike(got.env.get(name), x) for name, x in tensors(wanted.env))
    leaves = [leaf.name for leaf in program.leaves]
    return not (alike and all(_alike(got.env[name].grad, wanted.env[name].grad) for name in leaves))


def _alike(got: Any, wanted: torch.Tensor | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    same = got.dtype == wanted.dtype and got.shape == wanted.shape
    flags = same and _is_followed(got) == _is_followed(wanted)
    return flags and torch.allclose(got.detach(), wanted.detach(), rtol=1e-2, atol=1e-3, equal_nan=True)
