"""Margin losses: every row on its own, all its classes whole; a mean divides by the logical number of rows.

Not taken apart by torch's own decompositions: that of the multi-label loss differs from its kernel where a
row names fewer labels than there are classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import cutting_axes, layout_of, pending_bytes, register_algorithm
from shardwright.rules.call import Args, Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.op import by_name
from shardwright.rules.rule import register_rule

_NONE, _MEAN, _SUM = 0, 1, 2
_FORWARD = ("aten::multi_margin_loss", "aten::multilabel_margin_loss_forward")
_BACKWARD = ("aten::multi_margin_loss_backward", "aten::multilabel_margin_loss_backward")


def _rows(call: Call) -> str | None:
    """How the dim of the rows is written; None for a single number."""
    rank = len(call.arg("self").shape)
    if rank == 0:
        return None
    mark = "!" if call.arg("reduction") == _MEAN else ""
    return f"n{mark}" if rank == 2 else ""


def _of_one_class(call: Call, rows: str) -> str:
    """The dims of a target that names one class of every row."""
    return rows or ("_" if call.arg("target").shape else "()")


@register_rule(_FORWARD[0])
def multi_margin(call: Call) -> Formula | None:
    """One class of each row is right."""
    rows = _rows(call)
    if rows is None:
        return None
    classes = _of_one_class(call, rows)
    made = classes if call.arg("reduction") == _NONE else "()"
    return formula(f"{rows} c!, {classes}, c! -> {made}", reduce="sum")


@register_rule(_FORWARD[1])
def multilabel_margin(call: Call) -> Formula | None:
    """Several classes of each row are right."""
    rows = _rows(call)
    if rows is None:
        return None
    made = rows or "()" if call.arg("reduction") == _NONE else "()"
    return formula(f"{rows} c!, {rows} c! -> {made}, {rows} c!", reduce=("sum", None))


@register_rule(*_BACKWARD)
def margin_backward(call: Call) -> Formula | None:
    """Each row has its own gradient."""
    rows = _rows(call)
    if rows is None:
        return None
    grad = rows if rows and call.arg("grad_output").shape else "()"
    several = "is_target" in call.bound
    rest = f"{rows} c!, {rows} c!" if several else f"{_of_one_class(call, rows)}, c!"
    return formula(f"{grad}, {rows} c!, {rest} -> {rows} c!", hom="grad_output: sum->sum")


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    """A mean over cut rows: one number is reduced, and every rank knows how many rows there are."""
    own = layout_of(call, layouts, "self")
    if own is None or call.arg("reduction") != _MEAN or len(own.shape) != 2 or not cutting_axes(own, (0,)):
        return None
    return 2 * own.itemsize + pending_bytes(layouts)


def _summed(op: Any, args: Args) -> Callable[..., Any]:
    """The call with the sum in place of the mean."""
    given = {**by_name(op, args, {}), "reduction": _SUM}
    return lambda **changed: op(**{**given, **changed})


@register_algorithm(*_FORWARD, cost=_cost)
def mean_margin(op: Any, x: Tensor, *args: Any) -> Any:
    """margin loss: the sum over all rows, divided by their number."""
    made = _summed(op, (x, *args))()
    rows = x.shape[0]
    return (made[0] / rows, made[1]) if isinstance(made, tuple | list) else made / rows


@register_algorithm(*_BACKWARD, cost=_cost)
def mean_margin_backward(op: Any, grad_output: Tensor, x: Tensor, *args: Any) -> Tensor:
    """margin loss's backward: the gradient of the sum, divided by the number of rows."""
    made: Tensor = _summed(op, (grad_output, x, *args))(grad_output=grad_output / x.shape[0])
    return made
