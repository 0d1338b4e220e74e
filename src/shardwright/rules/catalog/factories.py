"""Factories that take a tensor as a model: `zeros_like`, `new_full`, ...; only its metadata is read."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

LIKE = "zeros_like ones_like full_like"
# Memory without values is as good for terms as for values; torch copies gradients into it.
UNFILLED = ("self: sum->sum",)

for _name in LIKE.split():
    rule(f"aten::{_name}", "~... -> ...", elementwise=True)
rule("aten::empty_like", "... -> ...", hom=UNFILLED, elementwise=True)


@register_rule("aten::new_empty")
def new_unfilled(call: Call) -> Formula:
    """As `new`; terms of a sum get memory for terms."""
    if tuple(call.arg("size")) == call.arg("self").shape:
        return formula("... -> ...", hom=UNFILLED, shapes={"size": "@0"}, elementwise=True)
    return formula("~ -> -")


@register_rule("aten::new_zeros", "aten::new_ones", "aten::new_full")
def new(call: Call) -> Formula:
    """Of the model's shape: placed like the model. Of another: whole, whatever the model's placement."""
    if tuple(call.arg("size")) == call.arg("self").shape:
        return formula("~... -> ...", shapes={"size": "@0"}, elementwise=True)
    return formula("~ -> -")


@register_rule("aten::new_empty_strided")
def new_strided(call: Call) -> Formula:
    """As `new_unfilled`, with the local strides."""
    if tuple(call.arg("size")) == call.arg("self").shape:
        return formula(
            "... -> ...", hom=UNFILLED, shapes={"size": "@0"}, strides=("stride",), elementwise=True
        )
    return formula("~ -> -")
