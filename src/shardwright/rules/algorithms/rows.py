"""Programs over rows: written once, run on logical tensors or, where that is the same, on one rank's parts.

A softmax along a dim works element by element, but for two numbers per row: its maximum and its sum. A
program takes these from `Rows`, which knows how a row is reduced where several ranks hold parts of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

from torch import Tensor

from shardwright.rules.algorithms.algorithm import Cost, register_algorithm
from shardwright.rules.algorithms.ops import finish
from shardwright.rules.registry import OpName

Dims = int | tuple[int, ...]


class Rows(Protocol):
    """How rows are reduced; the reduced dims stay, 1 long. why: for the record of what is sent."""

    def max(self, x: Tensor, dims: Dims, why: str) -> Tensor:
        """The largest element of each row; NaN wins."""

    def sum(self, x: Tensor, dims: Dims, why: str) -> Tensor:
        """The sum of each row."""


class LogicalRows:
    """Rows of logical tensors: the reductions are ops like any other."""

    def max(self, x: Tensor, dims: Dims, why: str) -> Tensor:
        """See `Rows`."""
        return finish(x.amax(dims, keepdim=True), why)

    def sum(self, x: Tensor, dims: Dims, why: str) -> Tensor:
        """See `Rows`."""
        return finish(x.sum(dims, keepdim=True), why)


Program = Callable[..., Any]


def row_program(*ops: OpName, cost: Cost) -> Callable[[Program], Program]:
    """Register `(rows, *args, **kwargs)` as an algorithm: elementwise ops on operands and rows, nothing else.

    Its results have the shape of its operands, which have one shape. See `register_algorithm`.
    """

    def register(program: Program) -> Program:
        @wraps(program)
        def on_logical_tensors(_op: object, *args: Any, **kwargs: Any) -> Any:
            return program(LogicalRows(), *args, **kwargs)

        register_algorithm(*ops, cost=cost, rows=program)(on_logical_tensors)
        return program

    return register
