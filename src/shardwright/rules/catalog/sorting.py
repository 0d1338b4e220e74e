"""Orderings along a dim, and searches in what is ordered: it must be whole."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.catalog.labels import join, letters
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

rule("aten::sort", "...[dim:d!] -> ...[dim:d!], ...[dim:d!]")
rule("aten::topk", "...[dim:_] -> ...[dim:_], ...[dim:_]")
rule("aten::bucketize.Tensor", "..., _ -> ...")
rule("aten::bucketize.Tensor_out", "..., _ -> ...")
rule("aten::histc", "... -> _", reduce="sum", when=lambda call: call.arg("min") != call.arg("max"))


@register_rule("aten::searchsorted.Tensor", "aten::searchsorted.Tensor_out")
def search(call: Call) -> Formula:
    """One ordered sequence for all values, or one for each index of the outer dims."""
    outer = letters(len(call.arg("sorted_sequence").shape) - 1)
    sequence = [*outer, "_"]
    values = [*outer, "v"] if outer else letters(len(call.arg("self").shape), "v")
    operands = [sequence, values] if call.arg("sorter") is None else [sequence, values, sequence]
    return formula(join(operands, [values]))
