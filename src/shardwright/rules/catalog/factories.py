"""Factories that take a tensor as a model: `zeros_like`, `new_full`, ...; only its metadata is read."""

from __future__ import annotations

from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

LIKE = "zeros_like ones_like full_like"

for _name in LIKE.split():
    rule(f"aten::{_name}", "~... -> ...", elementwise=True)


@register_rule("aten::empty_like", any_size=True)
def empty_like(call: Call) -> Formula:
    """Placed like the model; terms of a sum get memory for terms, as `_unfilled` says."""
    mark, facts = _unfilled(call)
    return formula(f"{mark}... -> ...", hom=facts, elementwise=True)


def _unfilled(call: Call) -> tuple[str, tuple[str, ...]]:
    """Memory without values is as good for terms as for values; torch copies gradients into it.

    Of another dtype nothing is a term, and nothing of the model is read.
    """
    made = call.results[0]
    same = made is not None and made.dtype == call.arg("self").dtype
    return ("", ("self: sum->sum",)) if same else ("~", ())


@register_rule("aten::new_empty")
def new_unfilled(call: Call) -> Formula:
    """As `new`; terms of a sum get memory for terms."""
    if tuple(call.arg("size")) == call.arg("self").shape:
        mark, facts = _unfilled(call)
        return formula(f"{mark}... -> ...", hom=facts, shapes={"size": "@0"}, elementwise=True)
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
        mark, facts = _unfilled(call)
        text = f"{mark}... -> ..."
        return formula(text, hom=facts, shapes={"size": "@0"}, strides=("stride",), elementwise=True)
    return formula("~ -> -")
