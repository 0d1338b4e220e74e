"""Softmax and its kin: the normalised dim is whole for the kernel; where it is cut, two numbers per row do.

The algorithms subtract a finished maximum, so they are as stable as the kernels, and compute in float32 for
half types, as these do. A row of -inf gives nan and NaN goes through, as on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.rules.algorithms.algorithm import over_rows, register_algorithm
from shardwright.rules.algorithms.ops import finish, wide
from shardwright.rules.algorithms.rows import Rows, row_program
from shardwright.rules.described import dims_of
from shardwright.rules.rule import rule

for _name in ("_softmax", "_log_softmax", "_safe_softmax"):
    rule(f"aten::{_name}", "...[dim:d!] -> ...[dim:d!]")
for _name in ("_softmax_backward_data", "_log_softmax_backward_data"):
    # The gradient of log_softmax subtracts output-weighted sums: linear in the gradient, not in the output.
    rule(f"aten::{_name}", "...[dim:d!], ...[dim:d!] -> ...[dim:d!]", hom="grad_output: sum->sum")
rule("aten::glu", "...[dim:_] -> ...[dim:_]")
rule("aten::glu_backward", "...[dim:_], ...[dim:_] -> ...[dim:_]", hom="grad_output: sum->sum")


_WHY = "softmax over a cut dim"


def _shifted(rows: Rows, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`x` minus the maximum of its row, and the row's sum of the exponentials of that."""
    x_wide = wide(x)
    shifted = x_wide - rows.max(x_wide, dim, _WHY)
    return shifted, rows.sum(shifted.exp(), dim, _WHY)


@row_program("aten::_softmax", cost=over_rows("self"))
def softmax(rows: Rows, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """softmax: the maximum and the sum of each row are reduced."""
    shifted, total = _shifted(rows, x, dim)
    out = shifted.exp_().div_(total)
    return out if half_to_float else out.to(x.dtype)


@row_program("aten::_log_softmax", cost=over_rows("self"))
def log_softmax(rows: Rows, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """log_softmax: the maximum and the sum of each row are reduced."""
    shifted, total = _shifted(rows, x, dim)
    out = shifted.sub_(total.log())
    return out if half_to_float else out.to(x.dtype)


@row_program("aten::_safe_softmax", cost=over_rows("self", reductions=2))
def safe_softmax(rows: Rows, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """safe softmax: as softmax; rows of -inf give zeros."""
    x_wide = wide(x if dtype is None else x.to(dtype))
    top = rows.max(x_wide, dim, _WHY)
    raised = (x_wide - top.masked_fill(top == -torch.inf, 0)).exp_()
    total = rows.sum(raised, dim, _WHY)
    return raised.div_(total.masked_fill(top == -torch.inf, 1))


@row_program("aten::_softmax_backward_data", cost=over_rows("grad_output", beside="output", reductions=1))
def softmax_backward(
    rows: Rows, grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """softmax's backward: one sum of each row is reduced."""
    grad, out = wide(grad_output), wide(output)
    weighted = grad * out
    total = rows.sum(weighted, dim, _WHY)
    return weighted.sub_(out * total).to(input_dtype)


@row_program("aten::_log_softmax_backward_data", cost=over_rows("grad_output", beside="output", reductions=1))
def log_softmax_backward(
    rows: Rows, grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    """log_softmax's backward: one sum of each row is reduced."""
    grad = wide(grad_output)
    total = rows.sum(grad, dim, "log_softmax over a cut dim")
    return (grad - wide(output).exp() * total).to(input_dtype)


@register_algorithm("aten::logsumexp", cost=over_rows("self"))
def logsumexp(_op: object, x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """logsumexp: the maximum and the sum of each row are reduced."""
    why = "logsumexp over a cut dim"
    dims = dims_of(dim, x.dim())
    is_number = x.is_floating_point() or x.is_complex()
    x_wide = wide(x) if is_number else x.to(torch.get_default_dtype())
    real = x_wide.real if x.is_complex() else x_wide
    top = finish(real.amax(dims, keepdim=True), why)
    top = top.masked_fill(top.abs() == torch.inf, 0)
    total = finish((x_wide - top).exp().sum(dims, keepdim=True), why).log()
    out = total + top
    return out if keepdim else out.squeeze(dims)
