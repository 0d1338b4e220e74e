"""Contractions: a label that both factors share and the product lacks is summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.registry import rewrite
from shardwright.rules.rule import register_rule, rule

_FACTORS = ("self: sum->sum", "mat2: sum->sum")
_BATCHES = ("self+batch1: sum->sum", "self+batch2: sum->sum")

rule("aten::mm", "m k, k n -> m n", reduce="sum", hom=_FACTORS)
rule("aten::_int_mm", "m k, k n -> m n", reduce="sum", hom=_FACTORS)
rule("aten::bmm", "b m k, b k n -> b m n", reduce="sum", hom=_FACTORS)
rule("aten::mv", "m k, k -> m", reduce="sum", hom=("self: sum->sum", "vec: sum->sum"))
rule("aten::dot", "k, k -> ()", reduce="sum", hom=("self: sum->sum", "tensor: sum->sum"))
rule("aten::vdot", "k, k -> ()", reduce="sum", hom=("self: sum->sum", "other: sum->sum"))
rule(
    "aten::addmm", "m? n?, m k, k n -> m n", reduce="sum", hom=("self+mat1: sum->sum", "self+mat2: sum->sum")
)
rule("aten::baddbmm", "b? m? n?, b m k, b k n -> b m n", reduce="sum", hom=_BATCHES)
rule("aten::addbmm", "m? n?, b m k, b k n -> m n", reduce="sum", hom=_BATCHES)
rule("aten::addmv", "m?, m k, k -> m", reduce="sum", hom=("self+mat: sum->sum", "self+vec: sum->sum"))
rule("aten::addr", "m? n?, m, n -> m n", hom=("self+vec1: sum->sum", "self+vec2: sum->sum"))
rule(
    "aten::linear",
    "... k, n k, n -> ... n",
    reduce="sum",
    hom=("input+bias: sum->sum", "weight+bias: sum->sum"),
)


@register_rule("aten::_grouped_mm")
def grouped_mm(call: Call) -> Formula | None:
    """Groups are runs of rows, of columns or of the contracted dim; what the offsets cut stays whole."""
    if call.arg("bias") is not None:
        return None
    ranks = len(call.arg("self").shape), len(call.arg("mat2").shape)
    text = {
        (2, 3): "m! k, g! k n, g! -> m! n",
        (2, 2): "m k!, k! n, g! -> g! m n",
        (3, 3): "g m k, g k n -> g m n",
        (3, 2): "g! m k, k n!, g! -> m n!",
    }[ranks]
    return formula(text, reduce="sum", hom=_FACTORS)


@rewrite("aten::_trilinear")
def trilinear(
    _op: object,
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,  # noqa: ARG001  how torch's kernel saves memory
) -> Tensor:
    """A product of three, each without the dims named for it, summed over dims: what einsum says."""
    rank = first.dim() + len(expand1)
    terms = ((first, expand1), (second, expand2), (third, expand3))
    operands = [value for x, missing in terms for value in (x, [d for d in range(rank) if d not in missing])]
    result: Tensor = torch.einsum(*operands, [d for d in range(rank) if d not in sumdim])
    return result
