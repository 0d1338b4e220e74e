"""Differentiable collectives over a process group, for code that works on plain local tensors.

Gradients follow one convention: what is differentiated is the sum of the losses of all ranks. So the
gradient of an all-reduce is an all-reduce, of a gather a reduce-scatter, of an exchange the exchange back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwright.comm import functional
from shardwright.errors import PlanError


def all_to_all_uneven(
    x: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    group: ProcessGroup,
    *,
    axis: str = "",
    reason: str = "",
) -> Tensor:
    """Send `in_splits[i]` rows to member i, receive `out_splits[i]`:  [sum(in), ...] -> [sum(out), ...].

    Args: out_splits, in_splits: one length per member, zeros allowed; known on both sides.
    Raises: PlanError: the splits do not fit the group or the rows of x.
    Cost: each rank sends all its rows but those for itself; backward: the reverse.
    """
    _check_splits(x, out_splits, in_splits, group)
    return _apply(_Exchange, x, tuple(out_splits), tuple(in_splits), group, (axis, reason))


def all_reduce(x: Tensor, op: str, group: ProcessGroup, *, axis: str = "", reason: str = "") -> Tensor:
    """Reduce over the group into a new tensor:  [...] -> [...]; "sum" and "avg" are differentiable.

    Args: op: "sum", "avg", "max", "min" or "product".
    Raises: PlanError: the reduction has no meaning for this dtype, or no derivative where one is needed.
    Cost: each rank sends 2(n-1)/n of x; backward the same.
    """
    return _apply(_Reduce, x, op, group, (axis, reason))


def all_gather_uneven(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup, *, axis: str = "", reason: str = ""
) -> Tensor:
    """Concatenate the members' rows, in group order:  [sizes[rank], ...] -> [sum(sizes), ...].

    Args: sizes: rows of every member, zeros allowed.
    Raises: PlanError: the sizes do not fit the group or x.
    Cost: each rank sends n-1 times x; backward sends (n-1)/n of the gradient.
    """
    _check_sizes(sizes, group, "sizes")
    if x.shape[0] != sizes[group.rank()]:
        raise PlanError(f"all_gather_uneven: x has {x.shape[0]} rows, but sizes says {sizes[group.rank()]}")
    return _apply(_Rows, x, True, tuple(sizes), group, (axis, reason))


def _check_splits(
    x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group: ProcessGroup
) -> None:
    _check_sizes(out_splits, group, "out_splits")
    _check_sizes(in_splits, group, "in_splits")
    if x.shape[0] != sum(in_splits):
        raise PlanError(
            f"all_to_all_uneven: x has {x.shape[0]} rows, but in_splits add up to {sum(in_splits)}"
        )


def _check_sizes(sizes: Sequence[int], group: ProcessGroup, name: str) -> None:
    if len(sizes) != group.size():
        raise PlanError(f"{name} has {len(sizes)} entries for a group of {group.size()} ranks")


def _apply(function: type[torch.autograd.Function], x: Tensor, *args: object) -> Tensor:
    result: Tensor = function.apply(x, *args)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, out_splits: Any, in_splits: Any, group: ProcessGroup, label: tuple[str, str]
    ) -> Tensor:
        ctx.back = (in_splits, out_splits, group, _backward(label))
        return functional.exchange_rows(x, out_splits, in_splits, group, axis=label[0], reason=label[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _apply(_Exchange, gradient, *ctx.back), None, None, None, None


class _Reduce(torch.autograd.Function):
    same_on_all_ranks = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, group: ProcessGroup, label: tuple[str, str]) -> Tensor:
        ctx.call = (op, group, label)
        return functional.reduce_over(x, op, group, axis=label[0], reason=label[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        op, group, label = ctx.call
        if op not in ("sum", "avg"):
            raise PlanError(
                f"all_reduce({op!r}) has no derivative here: detach the operand, or reduce with sum or avg"
            )
        return _apply(_Reduce, gradient, op, group, _backward(label)), None, None, None


class _Rows(torch.autograd.Function):
    """A gather of rows or a reduce-scatter to them: each is the other's backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gathers: bool, sizes: Any, group: ProcessGroup, label: tuple[str, str]
    ) -> Tensor:
        ctx.back = (not gathers, sizes, group, _backward(label))
        send = functional.gather_rows if gathers else functional.reduce_scatter_rows
        return send(x, sizes, group, axis=label[0], reason=label[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _apply(_Rows, gradient, *ctx.back), None, None, None, None


def _backward(label: tuple[str, str]) -> tuple[str, str]:
    axis, reason = label
    return axis, f"backward of {reason}" if reason else "backward"
