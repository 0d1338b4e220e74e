"""One interpreter of programs: on plain tensors it is the reference, on DTensors what is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.fuzz.placing import place, placements_of, values_of
from tests.fuzz.program import Leaf, Program, Ref, Step
from tests.ops.modes import MODES

Value = Any
Env = dict[str, Value]

HOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "g * 2": lambda g: g * 2,
    "g + g": lambda g: g + g,
    "g.clone()": lambda g: g.clone(),
    "-g": lambda g: -g,
    "None": lambda g: None,
}
_ROOTS = {"torch": torch, "F": torch.nn.functional}
_BUILTINS: dict[str, Callable[..., Any]] = {"bool": bool, "float": float, "int": int, "len": len}


@dataclass
class Outcome:
    """The variables at the end, the error that ended it and where, and what each step wrote.

    `written`: by step, the variables whose version counter it raised. `detached`: its results have no
    graph, as those of an erased function that has run its backward; `replayed`: was any call a replay?
    """

    env: Env = field(default_factory=dict)
    error: Exception | None = None
    step: int = -1
    written: list[tuple[str, ...]] = field(default_factory=list)
    detached: bool = False
    replayed: bool = False


class Plain:
    """One device."""

    def leaf(self, leaf: Leaf) -> torch.Tensor:
        return values_of(leaf).requires_grad_(leaf.grad)

    def move(self, x: torch.Tensor, placements: tuple[str, ...]) -> torch.Tensor:
        return _Copied.apply(x) if x.requires_grad else x.clone()  # type: ignore[no-untyped-call]

    def after(self, env: Env, names: tuple[str, ...]) -> None:
        """Nothing."""


class _Copied(torch.autograd.Function):
    """A copy whose gradient is a copy: the gradient of a move is another tensor than the one that came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # nothing stays nothing, as of a move
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else grad.clone()


class OnMesh:
    """The ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def leaf(self, leaf: Leaf) -> torch.Tensor:
        return place(leaf, self.mesh)

    def move(self, x: torch.Tensor, placements: tuple[str, ...]) -> torch.Tensor:
        assert isinstance(x, sw.DTensor)
        return x.redistribute(placements=placements_of(placements, self.mesh)).clone()

    def after(self, env: Env, names: tuple[str, ...]) -> None:
        """Nothing."""


Device = Plain | OnMesh


def run(program: Program, device: Device) -> Outcome:
    """All steps, until one raises; the leaves are made before their mode begins, as a model is."""
    out = Outcome()
    try:
        for leaf in program.leaves:
            out.env[leaf.name] = device.leaf(leaf)
        device.after(out.env, tuple(out.env))
    except Exception as error:  # noqa: BLE001 - what a program raises is its answer
        out.error = error
        return out
    with MODES[program.under]():
        for number, step in enumerate(program.steps):
            out.step = number
            before = versions(out.env)
            try:
                execute(step, out.env, device)
            except Exception as error:  # noqa: BLE001
                out.error = error
                return out
            grown = tuple(name for name, version in before.items() if out.env[name]._version > version)
            out.written.append(grown)
            device.after(out.env, (*step.outs, *grown))
    return out


def versions(env: Env) -> dict[str, int]:
    """The version counter of each tensor; those that inference mode makes have none."""
    return {n: x._version for n, x in env.items() if isinstance(x, torch.Tensor) and not x.is_inference()}


def execute(step: Step, env: Env, device: Device) -> None:
    """One step; its results become variables."""
    with contextlib.nullcontext() if step.grad else torch.no_grad():
        result = _call(step, env, device)
    if step.many:
        env.update(zip(step.outs, result, strict=True))
    elif step.outs:
        env[step.outs[0]] = result


def _call(step: Step, env: Env, device: Device) -> Any:
    args = resolved(step.args, env)
    kwargs = {name: resolved(value, env) for name, value in step.kwargs}
    call = step.call
    if call == "[]":
        return args[0][args[1]]
    if call == "[]=":
        args[0][args[1]] = args[2]
        return None
    if step.form == "attribute":
        return getattr(args[0], call[1:])
    if call == "hook":
        return _hooked(*args)
    if call == "move":
        return device.move(args[0], args[1])
    if call in _BUILTINS:
        return _BUILTINS[call](*args)
    if call.startswith("."):
        return getattr(args[0], call[1:])(*args[1:], **kwargs)
    if call == "torch.autograd.grad":
        return [
            _own(grad, kwargs.get("create_graph", False)) for grad in torch.autograd.grad(*args, **kwargs)
        ]
    return function_of(call)(*args, **kwargs)


def _own(grad: torch.Tensor | None, in_graph: bool) -> torch.Tensor | None:
    """In memory of its own: whether a gradient is a view of the one that was given, no promise of torch says.

    On one device it depends on whether a view was written meanwhile: then torch copies, where it repeats the
    views for any other tensor.
    """
    if grad is None:
        return None
    return grad.clone() if in_graph else grad.detach().clone()


def _hooked(x: torch.Tensor, text: str) -> Any:
    """Ask for the node first: on a view whose base was written, torch itself dies of a hook otherwise."""
    return x.grad_fn and None, x.register_hook(HOOKS[text])


def function_of(path: str) -> Callable[..., Any]:
    """`torch.linalg.norm`, `F.softmax`."""
    root, *names = path.split(".")
    found: Any = _ROOTS[root]
    for name in names:
        found = getattr(found, name)
    assert callable(found)
    return found


def resolved(value: Any, env: Env) -> Any:
    """Every reference as its value."""
    if isinstance(value, Ref):
        return env[value.name]
    if isinstance(value, list | tuple):
        return type(value)(resolved(v, env) for v in value)
    return value


def tensors(env: Env) -> Iterator[tuple[str, torch.Tensor]]:
    """The variables that are tensors."""
    return ((name, x) for name, x in env.items() if isinstance(x, torch.Tensor))
