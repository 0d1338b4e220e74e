"""Normalisations: what is normalised must be whole; the rest may be cut."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardwright.compat import suggest_memory_format
from shardwright.layout.dtypes import HALF
from shardwright.rules.call import Call
from shardwright.rules.catalog.decomposing import decomposed, take_apart
from shardwright.rules.catalog.labels import join, letters
from shardwright.rules.formula import Formula, formula
from shardwright.rules.registry import rewrite
from shardwright.rules.rule import register_rule


def _dims(call: Call) -> tuple[list[str], list[str], list[str]]:
    """Labels of the outer dims, of the normalised ones, and a 1 for each of the latter."""
    inner = len(call.arg("normalized_shape"))
    outer = len(call.arg("input").shape) - inner
    return letters(outer), [f"e{i}!" for i in range(inner)], ["1"] * inner


@register_rule("aten::native_layer_norm", any_size=True)
def layer_norm(call: Call) -> Formula:
    """Weight and bias stand on the normalised dims; mean and rstd on the others."""
    outer, inner, ones = _dims(call)
    full, moments = [*outer, *inner], [*outer, *ones]
    shape = {"normalized_shape": " ".join(inner)}
    return formula(join([full, inner, inner], [full, moments, moments]), shapes=shape)


@register_rule("aten::native_layer_norm_backward", any_size=True)
def layer_norm_backward(call: Call) -> Formula:
    """The gradients of weight and bias are sums over the outer dims."""
    outer, inner, ones = _dims(call)
    full, moments = [*outer, *inner], [*outer, *ones]
    text = join([full, full, moments, moments, inner, inner], [full, inner, inner])
    shape = {"normalized_shape": " ".join(inner)}
    return formula(text, reduce=(None, "sum", "sum"), hom="grad_out: sum->sum", shapes=shape)


@register_rule("aten::_fused_rms_norm", any_size=True)
def rms_norm(call: Call) -> Formula:
    """As layer norm, without mean and bias."""
    outer, inner, ones = _dims(call)
    text = join([[*outer, *inner], inner], [[*outer, *inner], [*outer, *ones]])
    return formula(text, shapes={"normalized_shape": " ".join(inner)})


@register_rule("aten::_fused_rms_norm_backward", any_size=True)
def rms_norm_backward(call: Call) -> Formula:
    """As layer norm's, without mean and bias."""
    outer, inner, ones = _dims(call)
    full = [*outer, *inner]
    text = join([full, full, [*outer, *ones], inner], [full, inner])
    shape = {"normalized_shape": " ".join(inner)}
    return formula(text, reduce=(None, "sum"), hom="grad_out: sum->sum", shapes=shape)


@register_rule("aten::_weight_norm_interface", "aten::_weight_norm_interface_backward")
def weight_norm(call: Call) -> Formula:
    """Norms over all dims but the first or the last; the gradients are linear in that of the weight."""
    backward = "grad_w" in call.bound
    shape = call.arg("saved_v" if backward else "v").shape
    dim = call.arg("dim") % len(shape)
    full = ["n" if at == dim else "_" for at in range(len(shape))]
    ones = ["n" if at == dim else "1" for at in range(len(shape))]
    if backward:
        return formula(join([full, full, ones, ones], [full, ones]), hom="grad_w: sum->sum")
    return formula(join([full, ones], [full, ones]))


@register_rule("aten::native_group_norm")
def group_norm(call: Call) -> Formula:
    """Batch and channels inside whole groups would do; C and N are arguments, so only the batch is cut."""
    space = ["_"] * (len(call.arg("input").shape) - 2)
    full = ["n", "c!", *space]
    return formula(join([full, ["c!"], ["c!"]], [full, ["n", "_"], ["n", "_"]]), ints={"N": "n"})


@register_rule("aten::native_group_norm_backward")
def group_norm_backward(call: Call) -> Formula:
    """The gradients of weight and bias are sums over the batch."""
    space = ["_"] * (len(call.arg("input").shape) - 2)
    full, moments = ["n", "c!", *space], ["n", "_"]
    text = join([full, full, moments, moments, ["c!"]], [full, ["c!"], ["c!"]])
    return formula(text, reduce=(None, "sum", "sum"), hom="grad_out: sum->sum", ints={"N": "n"})


# Batch statistics are sums over the batch: taken apart, they are right on any part of it.
take_apart("aten::native_batch_norm_backward.default", "aten::batch_norm_backward.default")


@rewrite(
    "aten::native_batch_norm.default",
    "aten::_native_batch_norm_legit.default",
    "aten::_native_batch_norm_legit.no_stats",
    "aten::_native_batch_norm_legit_no_training.default",
)
def batch_norm(op: torch._ops.OpOverload, x: Tensor, *rest: Any, **named: Any) -> object:
    """Batch norm, its statistics in the type of wider parameters: a half mean would spoil the gradients.

    torch's own table rounds them to the type of `x`, its kernels do not; they give a memory format.
    """
    others = [value for value in (*rest, *named.values()) if isinstance(value, Tensor)]
    for other in others:  # as many elements in another shape would spread over other dims
        if other.dim() != 1:
            raise RuntimeError(f"batch norm expects 1 dim of what belongs to channels, got {other.dim()}")
    wide = x.dtype in HALF and any(other.dtype == torch.float32 for other in others)
    made = decomposed(op, x.float() if wide else x, *rest, **named)
    out, *statistics = cast("tuple[Tensor, ...]", made)
    return out.to(x.dtype).contiguous(memory_format=suggest_memory_format(x)), *statistics


@rewrite("aten::_batch_norm_with_update.default")
def batch_norm_with_update(
    _op: object,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch norm in training, with the empty reserve that its backward asks for."""
    out, mean, rstd = torch.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return out, mean, rstd, x.new_empty((0,), dtype=torch.uint8)
