"""Look-ups in a table of rows: the table's rows must be whole, its columns may be cut."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

rule("aten::embedding", "v! e, ... -> ... e", hom="weight: *")


@register_rule("aten::embedding_dense_backward")
def embedding_backward(call: Call) -> Formula:
    """Each row sums the gradients of its uses. Scaling by the number of uses needs all of them."""
    rank = len(call.arg("indices").shape)
    mark = "!" if call.arg("scale_grad_by_freq") else ""
    index = " ".join(f"a{i}{mark}" for i in range(rank))
    text = f"{index} e, {index or '()'} -> v! e"
    return formula(text, reduce="sum", hom="grad_output: sum->sum", ints={"num_weights": "v"})
