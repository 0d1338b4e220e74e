"""The loss of a linear layer's logits, in pieces of the batch: rows may be cut, features and classes not.

The kernel makes its gradients together with the loss. Both are those of a sum over the rows; a mean divides
them by the logical weight of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.rules.algorithms.algorithm import cutting_axes, layout_of, pending_bytes, register_algorithm
from shardwright.rules.algorithms.ops import finish
from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.op import by_name
from shardwright.rules.rule import register_rule, rule

_REDUCED = "torch_nn::_linear_cross_entropy_batch_chunked"


@register_rule(_REDUCED)
def chunked(call: Call) -> Formula:
    """The loss, and the gradients that were asked for; a mean wants every row."""
    n = "n" if call.arg("reduction") == "sum" else "n!"
    own = f"{n} d!" if call.arg("compute_input_grad") else "_ _"
    weight = "c! d!" if call.arg("compute_linear_weight_grad") else "_ _"
    bias = "c!" if call.arg("compute_linear_bias_grad") else "_"
    return formula(f"{n} d!, c! d!, {n}, c!, c! -> (), {own}, {weight}, {bias}", reduce="sum")


rule(f"{_REDUCED}_no_reduction", "n d!, c! d!, n, c!, c! -> n")


def _cost(call: Call, layouts: Sequence[Layout]) -> int | None:
    """A mean over cut rows: the weight of all rows is one number."""
    own, target = layout_of(call, layouts, "input"), layout_of(call, layouts, "target")
    if call.arg("reduction") != "mean" or own is None or target is None:
        return None
    if not (cutting_axes(own, (0,)) or cutting_axes(target, (0,))):
        return None
    return 4 * own.itemsize + pending_bytes(layouts)


@register_algorithm(_REDUCED, cost=_cost)
def chunked_mean(op: Any, *args: Any) -> tuple[Tensor, ...]:
    """linear_cross_entropy: the sum over the rows, divided by the weight of all of them."""
    given = {**by_name(op, args, {}), "reduction": "sum"}
    total = finish(_weight(given), "the weight of all rows of a mean loss")
    loss, *gradients = op(*given.values())
    return (loss / total, *(gradient / total for gradient in gradients))


def _weight(given: dict[str, Any]) -> Tensor:
    target: Tensor = given["target"]
    used = target != given["ignore_index"]
    if given["weight"] is None:
        count: Tensor = used.sum().to(given["input"].dtype)
        return count
    weights = torch.index_select(given["weight"], 0, target.masked_fill(~used, 0))
    finished: Tensor = finish(weights, "the weights of the classes")
    return finished.masked_fill(~used, 0).sum()
