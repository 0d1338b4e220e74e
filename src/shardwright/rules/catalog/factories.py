"""Factories that take a tensor as a model: `zeros_like`, `new_full`, ...; only its metadata is read."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

LIKE = "empty_like zeros_like ones_like full_like"

for _name in LIKE.split():
    rule(f"aten::{_name}", "~... -> ...", elementwise=True)


@register_rule("aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full")
def new(call: Call) -> Formula:
    """Of the model's shape: placed like the model. Of another: whole, whatever the model's placement."""
    if tuple(call.arg("size")) == call.arg("self").shape:
        return formula("~... -> ...", shapes={"size": "@0"}, elementwise=True)
    return formula("~ -> -")


@register_rule("aten::new_empty_strided")
def new_strided(call: Call) -> Formula:
    """As `new`, with the local strides."""
    if tuple(call.arg("size")) == call.arg("self").shape:
        return formula("~... -> ...", shapes={"size": "@0"}, strides=("stride",), elementwise=True)
    return formula("~ -> -")
