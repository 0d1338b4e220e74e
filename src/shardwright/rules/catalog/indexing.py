"""Gathers and scatters: along an indexed dim that is cut, every rank serves the indices that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from shardwright.rules.call import Call, TensorInfo
from shardwright.rules.catalog.held_index import indexed, looked_up, put, scattered
from shardwright.rules.catalog.labels import join, letters
from shardwright.rules.formula import Formula, formula
from shardwright.rules.rule import register_rule


def _sums(info: TensorInfo) -> str:
    """How looked-up values and zeros are joined."""
    return "any" if info.dtype == torch.bool else "sum"


def _worth_looking_up(call: Call) -> bool:
    """Whether the looked-up values are less to sum than the tensor is to gather."""
    made = call.results[0] if call.results else None  # none is known where a mask chooses
    return made is not None and 2 * prod(made.shape) <= prod(call.arg("self").shape)


def _one(call: Call, name: str, label: str = "_") -> str:
    """The dims of a tensor that stands beside one without dims: it has one or none."""
    return label if call.arg(name).shape else "()"


def _of_one_value(rest: str, hom: str | tuple[str, ...] = ()) -> Formula:
    """An indexed tensor without dims is whole."""
    return formula(f"(), {rest}", hom=hom, prefix=("*",))


@register_rule("aten::gather")
def gather(call: Call) -> Formula:
    """One value per index. Cut along the dim, the holder of an index has its value: a pending sum."""
    if not call.arg("self").shape:
        return _of_one_value(f"{_one(call, 'index', 'i')} -> {_one(call, 'index', 'i')}", "self: *")
    if _empty_of_other_rank(call):
        places = letters(len(call.arg("index").shape))
        return formula(join([["_"] * len(call.arg("self").shape), places], [places]), hom="self: *")
    dim = "d" if _worth_looking_up(call) else "_"
    return formula(
        f"...[dim:{dim}], ...[dim:j] -> ...[dim:j]",
        reduce=_sums(call.arg("self")),
        hom="self: *",
        prefix=("*",),
        local=looked_up,
        held=("d",),
    )


@register_rule("aten::index_select")
def index_select(call: Call) -> Formula:
    """Rows by number along the dim."""
    if not call.arg("self").shape:
        return _of_one_value(f"{_one(call, 'index')} -> ()", "self: *")
    dim = "d" if _worth_looking_up(call) else "_"
    several = bool(call.arg("index").shape)
    return formula(
        f"...[dim:{dim}], {'i' if several else '()'} -> ...[dim:{'i' if several else '_'}]",
        reduce=_sums(call.arg("self")),
        hom="self: *",
        local=looked_up,
        held=("d",),
    )


def _empty_of_other_rank(call: Call) -> bool:
    """An index that names nothing may have any number of dims."""
    return len(call.arg("index").shape) != len(call.arg("self").shape)


def _nothing_written(call: Call) -> Formula:
    """The tensor stays what it is."""
    own, given = letters(len(call.arg("self").shape)), call.bound.get("src")
    others = [["_"] * len(call.arg("index").shape)]
    if isinstance(given, TensorInfo):
        others.append(["_"] * len(given.shape))
    return formula(join([own, *others], [own]), hom="self: *")


def _onto_one_value(call: Call, source: str) -> Formula:
    """What is written onto a tensor without dims is whole, too."""
    given = isinstance(call.bound.get(source), TensorInfo)
    return _of_one_value(f"{_one(call, 'index')}{', ' + _one(call, source) if given else ''} -> ()")


@register_rule("aten::scatter", "aten::scatter_reduce")
def scatter(call: Call) -> Formula:
    """Values go to places along the dim. With a reduction they meet what is there."""
    if not call.arg("self").shape:
        return _onto_one_value(call, "src")
    if _empty_of_other_rank(call):
        return _nothing_written(call)
    patterns = ["...[dim:d]", "...[dim:j!]"]
    if isinstance(call.bound.get("src"), TensorInfo):
        patterns.append("...[dim:j!]" if call.arg("src").shape == call.arg("index").shape else "...[dim:_]")
    facts: tuple[str, ...] = ("self+src: *",) if call.bound.get("reduce") is None else ()
    if len(patterns) == 2:
        facts = _with_zeros(call)
    text = f"{', '.join(patterns)} -> ...[dim:d]"
    return formula(text, hom=facts, prefix=("*",), local=scattered, held=("d",))


@register_rule("aten::scatter_add")
def scatter_add(call: Call) -> Formula:
    """A sum over the index: cut along it, every coord holds terms."""
    if not call.arg("self").shape:
        return _onto_one_value(call, "src")
    if _empty_of_other_rank(call):
        return _nothing_written(call)
    same = call.arg("src").shape == call.arg("index").shape
    given = "...[dim:j]" if same else "...[dim:_]"
    text = f"...[dim:d], {given}, {given} -> ...[dim:d]"
    facts = "self+src: sum->sum"
    return formula(text, reduce="sum", hom=facts, prefix=("*",), local=scattered, held=("d",))


def _with_one_row(call: Call) -> str:
    """An index without dims names one row; the source may lack dims where there is but one to fill."""
    source = "...[dim:_]" if call.arg("source").shape else "()"
    return f"...[dim:d], {_one(call, 'index')}, {source} -> ...[dim:d]"


@register_rule("aten::index_add")
def index_add(call: Call) -> Formula:
    """Rows are added at places along the dim."""
    if not call.arg("self").shape:
        return _onto_one_value(call, "source")
    several = call.arg("index").shape and call.arg("source").shape
    return formula(
        "...[dim:d], i, ...[dim:i] -> ...[dim:d]" if several else _with_one_row(call),
        reduce="sum",
        hom="self+source: sum->sum",
        local=scattered,
        held=("d",),
    )


@register_rule("aten::index_reduce")
def index_reduce(call: Call) -> Formula:
    """Rows meet what is there, at places along the dim."""
    if not call.arg("self").shape:
        return _onto_one_value(call, "source")
    if not (call.arg("index").shape and call.arg("source").shape):
        return formula(_with_one_row(call).replace("dim:d", "dim:d!"))
    return formula("...[dim:d!], i!, ...[dim:i!] -> ...[dim:d!]")


@register_rule("aten::take")
def take(call: Call) -> Formula:
    """Elements by their number in the flattened tensor, which is whole; the index may be cut."""
    own, places = ["_"] * len(call.arg("self").shape), letters(len(call.arg("index").shape))
    return formula(join([own, places], [places]), hom="self: *")


@register_rule("aten::diag_embed")
def diag_embed(call: Call) -> Formula:
    """The last dim becomes two, both whole."""
    rank = len(call.arg("self").shape)
    outer = letters(rank - 1)
    result = iter(outer)
    diagonal = {call.arg("dim1") % (rank + 1), call.arg("dim2") % (rank + 1)}
    items = ["_" if dim in diagonal else next(result) for dim in range(rank + 1)]
    return formula(join([[*outer, "_"]], [items]), hom="self: sum->sum")


@register_rule("aten::index_copy", "aten::index_fill")
def index_copy(call: Call) -> Formula:
    """Rows are replaced at places along the dim."""
    if not call.arg("self").shape and "source" in call.bound:
        return _onto_one_value(call, "source")
    if not call.arg("self").shape:
        return _of_one_value(f"{_one(call, 'index')}{_value(call)} -> ()", _with_zeros(call))
    if "source" in call.bound:
        text = "...[dim:d], i!, ...[dim:i!] -> ...[dim:d]"
        if not (call.arg("index").shape and call.arg("source").shape):
            text = _with_one_row(call)
        return formula(text, hom="self+source: *", local=scattered, held=("d",))
    text = f"...[dim:d], {_one(call, 'index')}{_value(call)} -> ...[dim:d]"
    return formula(text, hom=_with_zeros(call), local=scattered, held=("d",))


def _with_zeros(call: Call) -> tuple[str, ...]:
    """Zeros at places of each term are zeros in the sum: what the gradients of such ops do."""
    value = call.arg("value")
    return () if isinstance(value, TensorInfo) or value != 0 else ("self: sum->sum",)


def _value(call: Call) -> str:
    return ", -" if isinstance(call.arg("value"), TensorInfo) else ""


@register_rule("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def index(call: Call) -> Formula | None:
    """`x[:, i, j]`: indexed dims whole, the index's own dims may be cut; the labels follow numpy's rules."""
    parts = _index_parts(call, mark="" if _worth_looking_up(call) else "!")
    if parts is None:
        return None
    own, index_items, result = parts
    return formula(
        join([own, *index_items], [result]),
        reduce=_sums(call.arg("self")),
        hom="self: *",
        local=indexed,
        held=_indexed_labels(own),
    )


@register_rule("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put")
def index_put(call: Call) -> Formula | None:
    """Values go to indexed places; the dims that are not indexed may be cut."""
    parts = _index_parts(call, whole=True)
    if parts is None:
        return _masked_put(call)
    own, index_items, result = parts
    values = result[len(result) - len(call.arg("values").shape) :]
    if len(call.arg("values").shape) > len(result):
        return None
    fact = "self+values: sum->sum" if call.arg("accumulate") else "self+values: *"
    optional = [item if item.endswith("_") else f"{item}?" for item in values]
    text = join([own, *index_items, optional], [own])
    return formula(text, hom=fact, local=put, held=_indexed_labels(own))


def _masked_put(call: Call) -> Formula | None:
    """`x[:, mask] = values` where every place that the mask chooses gets the same: no place is counted."""
    indices: tuple[TensorInfo | None, ...] = tuple(call.arg("indices"))
    given = [(dim, info) for dim, info in enumerate(indices) if info is not None]
    if len(given) != 1 or given[0][1].dtype not in {torch.bool, torch.uint8}:
        return None
    at, mask = given[0]
    own = letters(len(call.arg("self").shape))
    result = [*own[:at], "_", *own[at + len(mask.shape) :]]  # with one dim for the places that are chosen
    shape: tuple[int, ...] = call.arg("values").shape
    values = result[len(result) - len(shape) :]
    if len(shape) > len(result) or any(n != 1 for n, item in zip(shape, values, strict=True) if item == "_"):
        return None
    fact = "self+values: sum->sum" if call.arg("accumulate") else "self+values: *"
    optional = [item if item == "_" else f"{item}?" for item in values]
    return formula(join([own, own[at : at + len(mask.shape)], optional], [own]), hom=fact)


def _indexed_labels(own: Sequence[str]) -> tuple[str, ...]:
    return tuple(item for item in own if item.startswith("d") and not item.endswith("!"))


def _index_parts(
    call: Call, *, whole: bool = False, mark: str = ""
) -> tuple[list[str], list[list[str]], list[str]] | None:
    """Items of the indexed tensor, of each index and of `x[index]`; None for masks."""
    shape: tuple[int, ...] = call.arg("self").shape
    indices: tuple[TensorInfo | None, ...] = tuple(call.arg("indices"))
    given = [(dim, info) for dim, info in enumerate(indices) if info is not None]
    if not given or any(info.dtype in {torch.bool, torch.uint8} for _, info in given):
        return None
    rank = max(len(info.shape) for _, info in given)
    own = [f"d{dim}{mark}" if dim in dict(given) else f"a{dim}" for dim in range(len(shape))]
    places = [f"i{i}!" if whole else f"i{i}" for i in range(rank)]
    index_items = [[f"{place}?" for place in places[rank - len(info.shape) :]] for _, info in given]
    return own, index_items, _indexed(own, [dim for dim, _ in given], places)


def _indexed(own: list[str], dims: list[int], places: list[str]) -> list[str]:
    """The index dims take the place of the indexed ones if these are neighbours, else they come first."""
    kept = [item for dim, item in enumerate(own) if dim not in dims]
    if dims != list(range(dims[0], dims[-1] + 1)):
        return [*places, *kept]
    return [*own[: dims[0]], *places, *own[dims[-1] + 1 :]]
