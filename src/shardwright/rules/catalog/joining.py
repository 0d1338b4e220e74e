"""Tensors joined along a dim: it must be whole; pending values are joined while pending."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.catalog.labels import letters
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule


@register_rule("aten::cat")
def cat(call: Call) -> Formula:
    """Legacy empty operands of shape (0,) take no part; where one operand is left, it is the result."""
    tensors = [operand for operand in call.flat_operands if not operand.out]
    rank = max(len(operand.info.shape) for operand in tensors)
    full = letters(rank)
    if sum(len(operand.info.shape) == rank for operand in tensors) > 1:
        full[call.arg("dim") % rank] = "_"
    items = [" ".join(full) if len(operand.info.shape) == rank else "_" for operand in tensors]
    return formula(f"{', '.join(items)} -> {' '.join(full)}", hom="tensors: *")


@register_rule("aten::stack")
def stack(call: Call) -> Formula:
    """A new dim, one index per tensor."""
    labels = letters(len(call.operands[0].shape))
    dim = call.arg("dim") % (len(labels) + 1)
    result = [*labels[:dim], "_", *labels[dim:]]
    return formula(f"*{' '.join(labels) or '()'} -> {' '.join(result)}", hom="tensors: *")
