"""What propagation decides for one call: layouts of operands and results, arguments of the local call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch

from shardwright.index.runs import Runs, compose, interval, total
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition
from shardwright.placement.one_dim import held
from shardwright.rules.any_size import AnySize
from shardwright.rules.formula import LocalForm
from shardwright.rules.held_label import Held, HeldOfSymbol


@dataclass(frozen=True, slots=True)
class LabelSize:
    """The local size of a label: its logical size and the cuts, (axis, size of the axis, partition)."""

    size: int
    cuts: tuple[tuple[int, int, Partition], ...] = ()

    def at(self, coords: Sequence[int]) -> int:
        """How long the label is on these coords."""
        size = self.size
        for axis, n, part in self.cuts:
            size = part.local_shape((size,), n, coords[axis])[0]
        return size

    def held_at(self, coords: Sequence[int]) -> Held:
        """Which of its indices these coords hold."""
        runs: Runs = interval(0, self.size)
        for axis, n, part in self.cuts:
            runs = compose(runs, held(part, total(runs), n, coords[axis]))
        return Held(self.size, runs)


@dataclass(frozen=True, slots=True)
class LocalCall:
    """What a rank calls in place of the op: a function that is told which indices of a label it holds."""

    function: LocalForm
    labels: tuple[tuple[str, LabelSize], ...]

    def at(self, op: torch._ops.OpOverload, coords: Sequence[int]) -> LocalForm:
        """The function of the op's local arguments on these coords."""
        held = {name: label.held_at(coords) for name, label in self.labels}
        return partial(self.function, op, held)

    def of_symbols(
        self, op: torch._ops.OpOverload, coords: Sequence[int], sizes: Mapping[str, Any]
    ) -> LocalForm:
        """As `at`, where the labels have these sizes, of which some are symbols of a graph."""
        held = {
            name: HeldOfSymbol(sizes[name], partial(_held_of, label.cuts, coords))
            if isinstance(sizes[name], torch.SymInt)
            else label.held_at(coords)
            for name, label in self.labels
        }
        return partial(self.function, op, held)


def _held_of(cuts: tuple[tuple[int, int, Partition], ...], coords: Sequence[int], size: int) -> Held:
    return LabelSize(size, cuts).held_at(coords)


@dataclass(frozen=True, slots=True)
class LocalInt:
    """An integer argument of the local call: the product of label sizes."""

    factors: tuple[LabelSize, ...]

    def at(self, coords: Sequence[int]) -> int:
        """Its value on these coords."""
        return prod(factor.at(coords) for factor in self.factors)


@dataclass(frozen=True, slots=True)
class LocalShape:
    """A shape argument of the local call, dim by dim."""

    dims: tuple[LocalInt, ...]

    def at(self, coords: Sequence[int]) -> list[int]:
        """Its value on these coords."""
        return [dim.at(coords) for dim in self.dims]


@dataclass(frozen=True, slots=True)
class ResultShape:
    """A shape argument of the local call that is the local shape of a result."""

    layout: Layout

    def at(self, coords: Sequence[int]) -> list[int]:
        """Its value on these coords."""
        return list(self.layout.local_shape(tuple(coords)))


@dataclass(frozen=True, slots=True)
class ResultStride:
    """An argument of the local call that is the local strides of a result."""

    layout: Layout

    def at(self, coords: Sequence[int]) -> list[int]:
        """Its value on these coords."""
        return list(self.layout.local_stride(tuple(coords)))


LocalArg = LocalInt | LocalShape | ResultShape | ResultStride


@dataclass(frozen=True)
class Decision:
    """How to run a call: the same on all ranks.

    Args:
        inputs: the layout that each flattened tensor operand must have, in the order of `call.operands`.
        outputs: the layout of each flattened tensor result; None where the op returns no tensor.
        reason: one line for people: the rule, and what was chosen on each axis.
        fallback: all operands were made whole for want of a rule.
        cost_bytes: bytes that each rank sends for the inputs, about.
        overrides: arguments of the local call that differ from those of the logical call.
        runs_empty: a rank without elements must run the kernel too (lists, where other elements exist).
        rewrites: mutated operands (by index) that must change their layout for the call: the result has
            to be brought back to the layout that the operand has.
        local: what ranks call in place of the op; None: the op itself.
        any_size: the same decision for tensors of other sizes; None where it depends on them.
        same_way: gives what `any_size` is where other sizes choose the same way.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    reason: str
    fallback: bool = False
    cost_bytes: int = 0
    overrides: tuple[tuple[str, LocalArg], ...] = ()
    runs_empty: bool = False
    rewrites: tuple[int, ...] = ()
    local: LocalCall | None = None
    any_size: AnySize | None = field(default=None, compare=False, repr=False)
    same_way: Callable[[], AnySize | None] = field(default=lambda: None, compare=False, repr=False)

    def local_args(self, coords: tuple[int, ...]) -> dict[str, object]:
        """Schema arguments by name whose local value differs, for these coords; {} for most ops."""
        return {name: value.at(coords) for name, value in self.overrides}

    def __str__(self) -> str:
        inputs = ", ".join(str(layout) for layout in self.inputs)
        outputs = ", ".join(str(layout) for layout in self.outputs)
        return f"{inputs} -> {outputs}  ({self.reason})"
