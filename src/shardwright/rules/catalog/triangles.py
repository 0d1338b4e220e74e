"""Triangles and traces of matrices that are cut: each rank knows which of its elements count."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import cutting_axes, register_algorithm
from shardwright.rules.algorithms.ops import positions
from shardwright.rules.call import Call


def _cost(_call: Call, layouts: Sequence[Layout]) -> int | None:
    """Nothing, where an axis cuts the matrices."""
    rank = len(layouts[0].shape)
    cut = not layouts[0].pending_axes and cutting_axes(layouts[0], (rank - 2, rank - 1))
    return 0 if cut else None


def _above(x: Tensor) -> Tensor:
    """How far above the diagonal each element is:  [.., r, c] -> i64[1.., r, c]."""
    return positions(x, x.dim() - 1) - positions(x, x.dim() - 2)


@register_algorithm("aten::tril", cost=_cost)
def tril(_op: object, x: Tensor, diagonal: int = 0) -> Tensor:
    """tril: elements are filled by their positions."""
    return x.masked_fill(_above(x) > diagonal, 0)


@register_algorithm("aten::triu", cost=_cost)
def triu(_op: object, x: Tensor, diagonal: int = 0) -> Tensor:
    """triu: elements are filled by their positions."""
    return x.masked_fill(_above(x) < diagonal, 0)


@register_algorithm("aten::trace", cost=_cost)
def trace(_op: object, x: Tensor) -> Tensor:
    """trace: the sum of a view."""
    return x.diagonal().sum()
