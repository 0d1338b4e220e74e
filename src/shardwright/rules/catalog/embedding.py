"""Look-ups in a table of rows: where the rows are cut, who holds a row has it, and the sum is pending."""

from __future__ import annotations

from math import prod

from shardwright.rules.call import Call
from shardwright.rules.catalog.held_index import embedded, renormed, table_gradient
from shardwright.rules.catalog.labels import join
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

rule("aten::embedding", "v e, ... -> ... e", reduce="sum", hom="weight: *", local=embedded, held=("v",))


@register_rule("aten::embedding_renorm")
def embedding_renorm(call: Call) -> Formula:
    """Rows that are used get no longer than they may be; who holds a row does it."""
    used = ["_"] * len(call.arg("indices").shape)
    return formula(join([["v", "_"], used], [["v", "_"]]), local=renormed, held=("v",))


@register_rule("aten::embedding_dense_backward")
def embedding_backward(call: Call) -> Formula:
    """Each row sums the gradients of its uses. Scaling by the number of uses needs all of them."""
    rank = len(call.arg("indices").shape)
    # Terms of the whole table are more to add up than the gradients of its uses are to gather.
    larger = call.arg("num_weights") > prod(call.arg("indices").shape)
    mark = "!" if call.arg("scale_grad_by_freq") or larger else ""
    index = " ".join(f"a{i}{mark}" for i in range(rank))
    text = f"{index} e, {index or '()'} -> v e"
    return formula(
        text,
        reduce="sum",
        hom="grad_output: sum->sum",
        ints={"num_weights": "v"},
        local=table_gradient,
        held=("v",),
    )
