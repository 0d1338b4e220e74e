"""Gathers and scatters: the dims that are indexed must be whole, all others may be cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.catalog.labels import join
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule, rule

rule("aten::gather", "...[dim:_], ...[dim:j] -> ...[dim:j]", hom="self: *", prefix=("*",))


@register_rule("aten::index_select")
def index_select(call: Call) -> Formula | None:
    """Rows by number along the dim."""
    if not call.arg("self").shape or not call.arg("index").shape:
        return None
    return formula("...[dim:_], i -> ...[dim:i]", hom="self: *")


@register_rule("aten::scatter", "aten::scatter_reduce")
def scatter(call: Call) -> Formula | None:
    """Values go to places along the dim. With a reduction they meet what is there."""
    if len(call.arg("index").shape) != len(call.arg("self").shape):
        return None
    patterns = ["...[dim:d!]", "...[dim:j!]"]
    if isinstance(call.bound.get("src"), TensorInfo):
        patterns.append("...[dim:j!]" if call.arg("src").shape == call.arg("index").shape else "...[dim:_]")
    reduces = call.bound.get("reduce") is not None
    facts = ("self+src: *",) if not reduces else ()
    return formula(f"{', '.join(patterns)} -> ...[dim:d!]", hom=facts, prefix=("*",))


@register_rule("aten::scatter_add")
def scatter_add(call: Call) -> Formula | None:
    """A sum over the index: cut along it, every coord holds terms."""
    if len(call.arg("index").shape) != len(call.arg("self").shape):
        return None
    same = call.arg("src").shape == call.arg("index").shape
    source = "...[dim:j]" if same else "...[dim:_]"
    index = "...[dim:j]" if same else "...[dim:_]"
    return formula(
        f"...[dim:d!], {index}, {source} -> ...[dim:d!]",
        reduce="sum",
        hom="self+src: sum->sum",
        prefix=("*",),
    )


@register_rule("aten::index_add")
def index_add(call: Call) -> Formula | None:
    """Rows are added at places along the dim."""
    if not call.arg("self").shape:
        return None
    return formula("...[dim:d!], i, ...[dim:i] -> ...[dim:d!]", reduce="sum", hom="self+source: sum->sum")


@register_rule("aten::index_copy", "aten::index_fill")
def index_copy(call: Call) -> Formula | None:
    """Rows are replaced at places along the dim."""
    if not call.arg("self").shape:
        return None
    if "source" in call.bound:
        return formula("...[dim:d!], i!, ...[dim:i!] -> ...[dim:d!]", hom="self+source: *")
    value = ", -" if isinstance(call.arg("value"), TensorInfo) else ""
    return formula(f"...[dim:d!], i!{value} -> ...[dim:d!]")


@register_rule("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def index(call: Call) -> Formula | None:
    """`x[:, i, j]`: indexed dims whole, the index's own dims may be cut; the labels follow numpy's rules."""
    parts = _index_parts(call)
    if parts is None:
        return None
    own, index_items, result = parts
    return formula(join([own, *index_items], [result]), hom="self: *")


@register_rule("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put")
def index_put(call: Call) -> Formula | None:
    """Values go to indexed places; the dims that are not indexed may be cut."""
    parts = _index_parts(call, whole=True)
    if parts is None:
        return None
    own, index_items, result = parts
    values = result[len(result) - len(call.arg("values").shape) :]
    if len(call.arg("values").shape) > len(result):
        return None
    fact = "self+values: sum->sum" if call.arg("accumulate") else "self+values: *"
    optional = [item if item.endswith("_") else f"{item}?" for item in values]
    return formula(join([own, *index_items, optional], [own]), hom=fact)


def _index_parts(call: Call, *, whole: bool = False) -> tuple[list[str], list[list[str]], list[str]] | None:
    """Items of the indexed tensor, of each index and of `x[index]`; None for masks."""
    shape: tuple[int, ...] = call.arg("self").shape
    indices: tuple[TensorInfo | None, ...] = tuple(call.arg("indices"))
    given = [(dim, info) for dim, info in enumerate(indices) if info is not None]
    if not given or any(info.dtype in {torch.bool, torch.uint8} for _, info in given):
        return None
    rank = max(len(info.shape) for _, info in given)
    mark = "!" if whole else ""
    own = ["_" if dim in dict(given) else f"a{dim}" for dim in range(len(shape))]
    looked_up = [f"i{i}{mark}" for i in range(rank)]
    index_items = [_optional(looked_up[rank - len(info.shape) :]) for _, info in given]
    return own, index_items, _indexed(own, [dim for dim, _ in given], looked_up)


def _optional(items: Sequence[str]) -> list[str]:
    return [f"{item}?" for item in items]


def _indexed(own: list[str], dims: list[int], looked_up: list[str]) -> list[str]:
    """The index dims take the place of the indexed ones if these are neighbours, else they come first."""
    kept = [item for dim, item in enumerate(own) if dim not in dims]
    if dims != list(range(dims[0], dims[-1] + 1)):
        return [*looked_up, *kept]
    return [*own[: dims[0]], *looked_up, *own[dims[-1] + 1 :]]
