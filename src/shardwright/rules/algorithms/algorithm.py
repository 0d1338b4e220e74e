"""Algorithms: an op over a cut dim, rewritten in ops that have equations, where that sends less than a rule.

Softmax over a cut dim has no equation (every element depends on all), but its steps have: a maximum and a sum
of what each rank holds, finished on one number per row. An algorithm is such a rewriting. It is chosen for a
call only where the cheapest rule would send as much or more; where nothing has to move, the op stays one
local kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from shardwright.errors import RuleError, refuse_other_kind
from shardwright.layout.applied import cut_form
from shardwright.layout.layout import Layout
from shardwright.rules.call import Call
from shardwright.rules.decision import Decision
from shardwright.rules.described import dims_of
from shardwright.rules.registry import OpName, op_key, registry
from shardwright.rules.stated import overloads_of

Cost = Callable[[Call, Sequence[Layout]], "int | None"]
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One entry of the registry.

    Args:
        op: the op's name, as in rules.
        function: `(op, *args, **kwargs)`, the op's value from other ops; each of them is dispatched again.
        cost: bytes that each rank sends, about; None: not for this call on these layouts.
        text: for people.
        rows: the same as a program over rows (`rules.algorithms.rows`), which one rank can run on its parts.
    """

    op: str
    function: Callable[..., Any]
    cost: Cost
    text: str
    rows: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f"{self.op}: algorithm {self.text}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """An algorithm and what it is expected to send, for one call."""

    algorithm: Algorithm
    bytes: int

    @property
    def reason(self) -> str:
        """One line for people."""
        return f"algorithm {self.algorithm.text}: about {self.bytes} B sent by each rank"


def register_algorithm(
    *ops: OpName, cost: Cost, rows: Callable[..., Any] | None = None
) -> Callable[[_F], _F]:
    """Register the function as an algorithm of these ops: it is called with the op and the op's arguments.

    Written in torch ops on the logical tensors: on plain tensors it must give what the op gives.

    Args:
        ops: `ns::name` for all overloads, `ns::name.overload` for one; in-place and `out=` forms follow.
        cost: of the call and its layouts: the bytes that each rank will send, about, or None where the
            algorithm does not apply. The cheapest way wins; at equal bytes the algorithm.
        rows: the function as a program over rows; see `row_program`, which registers both.
    Raises: RuleError: no op is named, or one that torch does not know.
    """
    if not ops:
        raise RuleError("register_algorithm: name at least one op")
    fix, kinds = "a function of the call and its layouts that returns bytes or None", (Callable, type(None))
    refuse_other_kind("register_algorithm: cost", cost, Callable, RuleError, fix=fix)
    refuse_other_kind("register_algorithm: rows", rows, kinds, RuleError, fix="a program over rows, or None")
    if registry.open:
        for op in ops:
            overloads_of(op_key(op))

    def register(function: _F) -> _F:
        fix = "a function of the op and its arguments"
        refuse_other_kind("register_algorithm(...): function", function, Callable, RuleError, fix=fix)
        text = (function.__doc__ or "").strip().splitlines()
        for op in ops:
            said = text[0].rstrip(".") if text else getattr(function, "__name__", type(function).__name__)
            registry.add_algorithm(Algorithm(op_key(op), function, cost, said, rows))
        return function

    return register


def algorithm_for(call: Call, layouts: Sequence[Layout], decision: Decision) -> Chosen | None:
    """The cheapest algorithm for a call that no rule serves for nothing; None: stay with the rule."""
    if not (decision.cost_bytes or decision.fallback or decision.rewrites):
        return None
    found: list[Chosen] = []
    for algorithm in registry.algorithms_of(call.op):
        cost = algorithm.cost(call, layouts)
        if cost is not None:
            found.append(Chosen(algorithm, cost))
    if not found:
        return None
    best = min(found, key=lambda chosen: chosen.bytes)
    return best if best.bytes <= decision.cost_bytes else None


# ---------------------------------------------------------------------------------------- what it costs


def over_rows(
    operand: str,
    dim: str | Callable[[Call], Any] | None = "dim",
    *,
    beside: str = "",
    reductions: int = 2,
    itemsize: int = 0,
) -> Cost:
    """The cost of `reductions` all-reduces of what is left without the dims that `dim` says, or its argument.

    None where no axis cuts one of these dims, or one cuts them in a way that labels cannot tell.
    Args: beside: an operand of the same shape, which counts where the first is whole.
    """

    def cost(call: Call, layouts: Sequence[Layout]) -> int | None:
        value = call.arg(dim) if isinstance(dim, str) else dim and dim(call)
        for layout in (layout_of(call, layouts, name) for name in (operand, beside)):
            if layout is None:
                continue
            dims = dims_of(value, len(layout.shape))
            sent = row_bytes(layout, dims, itemsize or max(4, layout.itemsize))
            if sent is not None:
                return reductions * sent + pending_bytes(layouts)
            if any(placement.is_partition for placement in layout.placements):
                return None
        return None

    return cost


def layout_of(call: Call, layouts: Sequence[Layout], name: str) -> Layout | None:
    """The layout of the operand that an argument brought; None where there is none."""
    for operand, layout in zip(call.flat_operands, layouts, strict=True):
        if operand.name == name:
            return layout
    return None


def cutting_axes(layout: Layout, dims: Iterable[int]) -> tuple[int, ...] | None:
    """The mesh axes that cut one of these dims; None: some axis cuts elements as no label can tell."""
    wanted, found = set(dims), []
    for axis, (placement, n) in enumerate(zip(layout.placements, layout.sizes, strict=True)):
        if not placement.is_partition or n == 1:
            continue
        form = cut_form(layout, axis)
        if form is None:
            return None
        if form[0] in wanted:
            found.append(axis)
    return tuple(found)


def row_bytes(layout: Layout, dims: Sequence[int], itemsize: int, *, each: int = 1) -> int | None:
    """Bytes that a rank sends to all-reduce `each` numbers for every row that is left without `dims`."""
    axes = cutting_axes(layout, dims)
    if not axes or 0 in layout.shape:
        return None
    rows = prod(size for dim, size in enumerate(layout.shape) if dim not in set(dims))
    for axis, placement in enumerate(layout.placements):
        if placement.is_partition and axis not in axes:
            rows = -(-rows // layout.sizes[axis])
    return sum(2 * (layout.sizes[axis] - 1) * rows * each * itemsize // layout.sizes[axis] for axis in axes)


def pending_bytes(layouts: Sequence[Layout]) -> int:
    """Bytes that a rank sends to finish the operands that are pending, before anything else."""
    total = 0
    for layout in layouts:
        size = prod(layout.local_shape((0,) * len(layout.sizes))) * layout.itemsize
        for placement, n in zip(layout.placements, layout.sizes, strict=True):
            if placement.is_pending:
                total += 2 * size * (n - 1) // n
    return total
