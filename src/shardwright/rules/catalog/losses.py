"""Losses: a mean divides by the logical count, weights and all; classes may be cut.

The fused kernels divide by what they see; a part of the batch sees the wrong count. Most are taken apart by
torch's own decompositions, which pick, multiply and sum, and every one of these steps has a rule. The
negative log-likelihood picks one number of a row: who holds the class has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan, prod

import torch
from torch import Tensor

from shardwright.errors import OutsideError
from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import pending_bytes, register_algorithm
from shardwright.rules.algorithms.ops import finish, within
from shardwright.rules.call import Call, Op
from shardwright.rules.catalog.decomposing import decomposed, take_apart
from shardwright.rules.formula import Formula, formula
from shardwright.rules.registry import rewrite
from shardwright.rules.rule import register_rule

_NONE, _MEAN, _SUM = 0, 1, 2
_LOSSES = """
    mse_loss soft_margin_loss_backward
    binary_cross_entropy_backward binary_cross_entropy_with_logits
"""

take_apart(*(f"aten::{name}.default" for name in _LOSSES.split()))


@rewrite(*(f"aten::{name}_loss_backward.default" for name in ("mse", "huber")))
def of_some_elements(op: Op, grad: Tensor, x: Tensor, target: Tensor, reduction: int, *rest: float) -> object:
    """Their steps, which would divide the number 1 by the count; of no elements there is no gradient."""
    return decomposed(op, grad, x, target, reduction if x.numel() else _SUM, *rest)


@rewrite("aten::huber_loss.default", "aten::soft_margin_loss.default")
def as_the_input(
    op: Op, x: Tensor, target: Tensor, reduction: int = _MEAN, *rest: float, **named: float
) -> object:
    """Its steps, of the input's dtype beside a wider target too, as kernels write them."""
    made: Tensor = decomposed(op, x, target, reduction, *rest, **named)  # type: ignore[assignment]
    return made if made.dtype == x.dtype or not x.is_floating_point() else made.to(x.dtype)


@rewrite("aten::smooth_l1_loss_backward.default")
def smooth_l1_loss_backward(
    op: Op,  # noqa: ARG001  these are steps of its own
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    reduction: int,
    beta: float,
) -> object:
    """In steps that ask the difference once; torch's own take the sign of what is no number for 0."""
    apart = x - (target.to(x.dtype) if target.dtype == torch.bool else target)
    slope = (apart / beta).clamp(-1, 1) if beta else apart.sign().masked_fill(apart.isnan(), nan)
    return slope * (grad / x.numel() if reduction == _MEAN and x.numel() else grad)


@rewrite("aten::smooth_l1_loss.default")
def smooth_l1_loss(op: Op, x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> object:
    """Its steps, which would take any `beta`."""
    if not beta >= 0:  # nan as well
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    return decomposed(op, x, target, reduction, beta)


@rewrite("aten::binary_cross_entropy.default")
def binary_cross_entropy(
    op: Op, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> object:
    """Its steps, which would take any values, and weights of any shape."""
    if weight is not None and torch.broadcast_shapes(x.shape, weight.shape) != x.shape:
        raise RuntimeError(f"weights of shape {list(weight.shape)} do not fit losses of {list(x.shape)}")
    x = within(x, 0, 1, "all elements of input should be between 0 and 1")
    target = within(target, 0, 1, "all elements of target should be between 0 and 1")
    return decomposed(op, x, target, weight, reduction)


_FORWARD = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_BACKWARD = ("aten::nll_loss_backward", "aten::nll_loss2d_backward")


def _items(call: Call, mark: str) -> tuple[str, str]:
    """The dims of the log-probabilities and of the target; classes are whole."""
    rank = len(call.arg("self").shape)
    rows = [f"r{i}{mark}" for i in range(rank - 1)] if rank > 1 else []
    target = " ".join(rows) or "_" * len(call.arg("target").shape) or "()"
    return " ".join([*rows[:1], "c!", *rows[1:]]), target


@register_rule(*_FORWARD)
def nll_loss(call: Call) -> Formula:
    """One loss per row, or the sum of all; a mean wants every row."""
    reduction = call.arg("reduction")
    own, target = _items(call, "!" if reduction == _MEAN else "")
    rows = target.replace("_", "()")
    results = [rows if reduction == _NONE else "()", "-" if reduction == _NONE else "()"]
    return formula(f"{own}, {target}, - -> {', '.join(results)}", reduce="sum")


@register_rule(*_BACKWARD)
def nll_loss_backward(call: Call) -> Formula:
    """Each row has its own gradient."""
    own, target = _items(call, "")
    grad = target.replace("_", "()") if len(call.arg("grad_output").shape) else "()"
    return formula(f"{grad}, {own}, {target}, -, () -> {own}", hom="grad_output: sum->sum")


def _cost(call: Call, layouts: Sequence[Layout]) -> int:
    """A loss per row, or a few numbers, is all that is reduced."""
    shape: tuple[int, ...] = call.arg("target").shape
    return 8 * prod(shape) + pending_bytes(layouts)


@register_algorithm(*_FORWARD, cost=_cost)
def nll_of_picked(
    _op: object, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """nll_loss: who holds the class of a row has its loss; losses and weights are summed."""
    classes, used, safe, weights = _rows(x, target, weight, ignore_index)
    picked = _picked(x, classes, safe).squeeze(classes)
    losses = -picked if weights is None else -picked * weights
    losses = losses.masked_fill(~used, 0)
    if reduction == _NONE and x.dim() > 1:
        return losses, x.new_zeros(())
    total = used.sum().to(x.dtype) if weights is None else weights.masked_fill(~used, 0).sum()
    total = finish(total, "the weights of a mean loss")
    loss = losses.sum() if losses.dim() else losses
    return (loss / total if reduction == _MEAN else loss), total


def _picked(x: Tensor, classes: int, safe: Tensor) -> Tensor:
    """Raises: OutsideError: a class is none, as the loss's own kernel has it."""
    try:
        return x.gather(classes, safe.unsqueeze(classes))
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise OutsideError(f"a target is none of {x.shape[classes]} classes: {error}") from None


def _rows(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> tuple[int, Tensor, Tensor, Tensor | None]:
    """The dim of the classes; of each row: does it count, its class (0 if not), and that class's weight."""
    if x.dim() == 1 and target.dim() == 1:
        target = target[0]
    if target.shape != (*x.shape[:1], *x.shape[2:]) and x.dim() > 1:
        raise RuntimeError(f"size mismatch (got input: {list(x.shape)}, target: {list(target.shape)})")
    used = target != ignore_index
    safe = target.masked_fill(~used, 0)
    if weight is not None:
        weight = finish(weight.index_select(0, safe.reshape(-1)), "the weights of the classes")
        weight = weight.view(safe.shape)
    return 1 if x.dim() > 1 else 0, used, safe, weight


@register_algorithm(*_BACKWARD, cost=_cost)
def nll_backward_of_picked(
    _op: object,
    grad_output: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """nll_loss's backward: who holds the class of a row gets its gradient."""
    classes, used, safe, weights = _rows(x, target, weight, ignore_index)
    grad = grad_output / total_weight if reduction == _MEAN else grad_output
    rows = -grad if weights is None else -grad * weights
    rows = rows.expand(safe.shape).masked_fill(~used, 0)
    zeros = torch.zeros_like(x)
    return zeros.scatter(classes, safe.unsqueeze(classes), rows.unsqueeze(classes))
