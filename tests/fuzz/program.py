"""A random program as data: leaves with placements, and steps on named variables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of a variable."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that a program begins with.

    Args:
        placements: one per axis, as text: `"Shard(0)"`, `"Partial('max')"`.
        values: what is in it, see `placing.values_of`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    values: str
    seed: int
    grad: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class Step:
    """One call: `outs = call(*args, **kwargs)`.

    Args:
        call: `torch.add`, `F.softmax`, `.add_` (a method of the first argument), `[]`, `[]=`, `.T` with
            `form="attribute"`, a builtin (`bool`), `hook` or `move`.
        form: how the op is written: plain, method, in place, out=, list, through a view, ...
        grad: False: under `torch.no_grad()`.
        many: the call gives a list or tuple, also where that has one member.
    """

    outs: tuple[str, ...]
    call: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    form: str = "plain"
    grad: bool = True
    many: bool = False

    def reads(self) -> set[str]:
        """The variables that it names."""
        return {leaf.name for leaf in values_in((self.args, self.kwargs)) if isinstance(leaf, Ref)}

    def source(self) -> str:
        """The line of Python that it is."""
        line = self._call_source()
        if self.outs:
            line = f"{', '.join(self.outs)}{',' if self.many and len(self.outs) == 1 else ''} = {line}"
        return line if self.grad else f"with torch.no_grad(): {line}"

    def _call_source(self) -> str:
        args = self.args
        if self.call == "[]":
            return f"{source_of(args[0])}[{_index_source(args[1])}]"
        if self.call == "[]=":
            return f"{source_of(args[0])}[{_index_source(args[1])}] = {source_of(args[2])}"
        if self.form == "attribute":
            return f"{source_of(args[0])}{self.call}"
        if self.call == "hook":
            return f"{source_of(args[0])}.register_hook(lambda g: {args[1]})"
        if self.call == "move":
            return f"move({source_of(args[0])}, {list(args[1])})"
        named = [f"{name}={source_of(value)}" for name, value in self.kwargs]
        if self.call.startswith("."):
            return f"{source_of(args[0])}{self.call}({', '.join([source_of(a) for a in args[1:]] + named)})"
        return f"{self.call}({', '.join([source_of(a) for a in args] + named)})"


@dataclass(frozen=True, slots=True)
class Program:
    """Leaves and steps, on a mesh of these sizes.

    `seed`: what it was drawn from. `under`: which of `tests.ops.modes` the steps run in. `compiled`: by which
    backend of `torch.compile`; none if empty.
    """

    mesh: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    seed: int = -1
    under: str = ""
    compiled: str = ""

    def lines(self) -> list[str]:
        """The leaves and steps as source, one a line."""
        made = [
            f"{leaf.name} = leaf({leaf.shape}, torch.{leaf.dtype}, {list(leaf.placements)}, "
            f"{leaf.values!r}, seed={leaf.seed}, grad={leaf.grad})"
            for leaf in self.leaves
        ]
        return made + [step.source() for step in self.steps]


def renamed(step: Step, old: str, new: str) -> Step:
    """The step with another variable for one that it reads."""

    def other(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(other(v) for v in value)
        return Ref(new) if value == Ref(old) else value

    return replace(step, args=other(step.args), kwargs=other(step.kwargs))


def source_of(value: Any) -> str:
    """A value as Python source."""
    if isinstance(value, list):
        return f"[{', '.join(source_of(v) for v in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(source_of(v) for v in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return f"slice({source_of(value.start)}, {source_of(value.stop)}, {source_of(value.step)})"
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - a NaN
        return 'float("nan")'
    return "..." if value is Ellipsis else repr(value)


def _index_source(index: Any) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    return ", ".join(_slice_source(part) for part in parts) or "()"


def _slice_source(part: Any) -> str:
    if not isinstance(part, slice):
        return source_of(part)
    text = ":".join("" if v is None else str(v) for v in (part.start, part.stop))
    return text if part.step is None else f"{text}:{part.step}"


def values_in(value: Any) -> Iterator[Any]:
    """The arguments of a step, those in lists included."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from values_in(item)
    else:
        yield value
