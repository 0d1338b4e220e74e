"""Reductions over dims: a cut dim that is reduced leaves a pending result. Scans need their dim whole."""

from __future__ import annotations

from math import inf

from shardwright.rules.call import Call
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule

# name -> how parts combine, and what it keeps of pending values
_REDUCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sum": ("sum", ("self: sum->sum",)),
    "nansum": ("sum", ()),
    "amax": ("max", ("self: max->max",)),
    "amin": ("min", ("self: min->min",)),
    "any": ("any", ("self: any->any",)),
    "all": ("all", ("self: all->all",)),
    "prod": ("product", ("self: product->product",)),
    "count_nonzero": ("sum", ()),
    "trace": ("", ("self: sum->sum",)),
}
# What needs all values of its dim on one rank, to be found or ordered.
_WHOLE_DIM = "argmax argmin median nanmedian mode kthvalue logsumexp aminmax std var std_mean var_mean"
_SCANS = "cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper"


def _reduced(call: Call) -> str:
    """The notation of the result: its dims dropped, or none left."""
    return "...[dim:]" if "dim" in call.bound else "()" if not _keeps(call) else "..."


def _keeps(call: Call) -> bool:
    return bool(call.results) and call.results[0] is not None and len(call.results[0].shape) > 0


@register_rule(*(f"aten::{name}" for name in _REDUCTIONS if name != "trace"), any_size=True)
def reduction(call: Call) -> Formula:
    """Sum, extremes, any, all, product."""
    name = _plain_name(call)
    monoid, facts = _REDUCTIONS[name]
    if name in {"any", "all"} and str(call.operands[0].dtype) != "torch.bool":
        facts = ()
    return formula(f"... -> {_reduced(call)}", reduce=monoid, hom=facts)


def _plain_name(call: Call) -> str:
    name: str = call.op._schema.name.partition("::")[2]
    return name.removeprefix("_foreach_").removesuffix("_")


@register_rule("aten::trace")
def trace(call: Call) -> Formula:  # noqa: ARG001  every call alike
    """The diagonal knows which row is which column."""
    return formula("_ _ -> ()", hom="self: sum->sum")


@register_rule("aten::max", "aten::min", any_size=True)
def extreme(call: Call) -> Formula:
    """Of all elements, along a dim (with indices), or of two tensors."""
    name = _plain_name(call)
    if "other" in call.bound:
        return formula("*... -> ...", hom=f"self+other: {name}->{name}", elementwise=True)
    if "dim" in call.bound:
        return formula("...[dim:_] -> ...[dim:], ...[dim:]")
    return formula("... -> ()", reduce=name, hom=f"self: {name}->{name}")


@register_rule(*(f"aten::{name}" for name in _WHOLE_DIM.split()), any_size=True)
def whole_dim(call: Call) -> Formula:
    """The reduced dims must be whole; without `dim`, all of them."""
    return formula(f"{_whole(call)} -> {', '.join([_reduced(call)] * len(call.results))}")


def _whole(call: Call) -> str:
    """The notation of the operand when what is reduced must be whole."""
    return "...[dim:_]" if "dim" in call.bound else " ".join(["_"] * len(call.operands[0].shape)) or "()"


@register_rule(*(f"aten::{name}" for name in _SCANS.split()), any_size=True)
def scan(call: Call) -> Formula:
    """Each element depends on those before it along the dim."""
    facts = ("self: sum->sum",) if call.op._schema.name.endswith(("cumsum", "cumsum_")) else ()
    results = ", ".join(["...[dim:d!]"] * max(1, len(call.results)))
    operands = ", ".join(["...[dim:d!]"] * len([o for o in call.flat_operands if not o.out]))
    return formula(f"{operands} -> {results if call.results else ''}", hom=facts)


_NORM_MONOIDS = {2.0: "norm2", 1.0: "sum", 0.0: "sum", inf: "max", -inf: "min"}


@register_rule("aten::linalg_vector_norm", "aten::_foreach_norm", "aten::norm", any_size=True)
def vector_norm(call: Call) -> Formula:
    """Norms of parts combine by the norm itself; for other powers than 0, 1, 2, inf the dims are whole."""
    order = call.bound["ord"] if "ord" in call.bound else call.bound.get("p")
    power = 2.0 if order is None else float(order) if isinstance(order, int | float) else None
    monoid = None if power is None else _NORM_MONOIDS.get(power)
    result = _reduced(call)
    if monoid is None:
        return formula(f"{_whole(call)} -> {result}")
    facts = ("self: norm2->norm2",) if monoid == "norm2" else ()
    return formula(f"... -> {result}", reduce=monoid, hom=facts)
