"""Losses and their gradients. A mean is rewritten to a sum over the logical count before anything is sharded."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule

_POINTWISE = "smooth_l1_loss huber_loss soft_margin_loss"


@register_rule(*(f"aten::{name}" for name in _POINTWISE.split()), "aten::mse_loss", "aten::binary_cross_entropy")
def pointwise_loss(call: Call) -> Formula:
    """Without reduction elementwise; summed, a sum. A mean needs everything on one rank."""
    reduction = call.arg("reduction")
    if reduction == 0:
        return formula("*... -> ...", elementwise=True)
    if reduction == 2:
        return formula("*... -> ()", reduce="sum")
    rank = len(call.arg("self").shape)
    return formula(f"*{' '.join(['_'] * rank) or '()'} -> ()")


@register_rule(
    *(f"aten::{name}_backward" for name in _POINTWISE.split()),
    "aten::mse_loss_backward",
    "aten::binary_cross_entropy_backward",
)
def pointwise_loss_backward(call: Call) -> Formula:
    """Elementwise, linear in the gradient; of a mean, every rank must know the logical count."""
    if call.arg("reduction") != 1:
        return formula("*... -> ...", hom="grad_output: sum->sum", elementwise=True)
    rank = len(call.arg("self").shape)
    return formula(f"(), *{' '.join(['_'] * rank) or '()'} -> {' '.join(['_'] * rank) or '()'}")
