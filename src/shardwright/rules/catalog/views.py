"""Views: they rename elements, so a cut stays a cut of the same elements, and any pending value stays.

What a view sees is said once, by `view_maps`; here it is read as labels: a source dim that a dim of the
target shows as it is has one, any other is whole. The ways for views come first and keep every cut; the
labels are for the calls of which each rank's is the same call.
"""

from __future__ import annotations

import torch

from shardwright.index.view import View
from shardwright.rules.call import Call
from shardwright.rules.catalog.labels import join, letters
from shardwright.rules.catalog.reshaping import reshape_formula
from shardwright.rules.catalog.view_maps import views_of
from shardwright.rules.formula import Formula, formula
from shardwright.rules.registry import rewrite
from shardwright.rules.rule import register_rule, rule

_KEEP = ("self: *",)
_Items = list[str]


def _shape(call: Call) -> tuple[int, ...]:
    shape: tuple[int, ...] = call.arg("self").shape
    return shape


def _result_shape(call: Call) -> tuple[int, ...]:
    result = call.results[0]
    return () if result is None else result.shape


@register_rule("aten::permute", "aten::select.int", "aten::t", "aten::transpose", any_size=True)
@register_rule("aten::unfold", "aten::unsqueeze", any_size=True)
@register_rule("aten::diagonal", "aten::slice.Tensor", "aten::squeeze.dim", "aten::squeeze.dims")
@register_rule("aten::split.Tensor", "aten::split_with_sizes", "aten::unbind", "aten::unsafe_split")
def picked(call: Call) -> Formula | None:
    """Dims change places, vanish, or show some of their indices."""
    seen = _seen(call)
    if seen is None:
        return None
    dim = _cut_inside(call, seen)
    if dim is None:
        return formula(_labels(seen, _whole_dims(call)), hom=_KEEP)
    labels, parts = letters(len(_shape(call))), len(seen)
    left = [*labels[:dim], f"({parts} h)", *labels[dim + 1 :]]
    right = [*labels[:dim], "h", *labels[dim + 1 :]]
    return formula(join([left], [right] * parts), hom=_KEEP, ints={"split_size": "h"})


@register_rule("aten::expand", "aten::view", "aten::_unsafe_view")
def resized(call: Call) -> Formula | None:
    """Views that are told the sizes of their results: dims split, merged and repeated."""
    seen = _seen(call)
    return None if seen is None else formula(_labels(seen), hom=_KEEP, shapes={"size": "@0"})


@register_rule("aten::view_as_complex", "aten::view_as_real", any_size=True)
def on_elements(call: Call) -> Formula | None:
    """Halves of complex numbers are a dim of size 2: only sums of them are sums of the numbers."""
    seen = _seen(call)
    return None if seen is None else formula(_labels(seen), hom="self: sum->sum")


@register_rule("aten::view.dtype", any_size=True)
def reinterpreted(call: Call) -> Formula | None:
    """The bits of each element read anew: of a type as wide, each element is one again."""
    source, result = call.arg("self").dtype, call.results[0]
    if result is None or result.dtype.itemsize != source.itemsize:
        return None
    return formula("... -> ...", hom=_KEEP if result.dtype == source else (), elementwise=True)


@register_rule("aten::as_strided")
def as_strided(call: Call) -> Formula | None:
    """Only the one that changes nothing: the strides of a local tensor are others."""
    seen = _seen(call)
    if seen is None or not seen[0].nothing_changes or tuple(call.arg("stride")) != call.arg("self").stride:
        return None
    return formula(_labels(seen), hom=_KEEP, shapes={"size": "@0"}, strides=("stride",))


def _seen(call: Call) -> list[View] | None:
    """What each result sees of the operand; None where it is no view, or several in turn."""
    chains = views_of(call, or_out=True)
    return None if chains is None or any(len(chain) > 1 for chain in chains) else [one for (one,) in chains]


def _labels(seen: list[View], whole: frozenset[int] = frozenset()) -> str:
    """The notation of what the results see. whole: dims that no axis may cut."""
    first = seen[0]
    if first.rows is None:
        return _reshaped(first, whole)
    shown = [[view.keeps(dim) for view in seen] for dim in range(len(first.source))]
    labels = letters(len(shown))
    left = ["_" if dim in whole or None in at else labels[dim] for dim, at in enumerate(shown)]
    return join([left], [_items_of(view, left) for view in seen])


def _reshaped(view: View, whole: frozenset[int]) -> str:
    """The notation of a reshape; a label of one dim alone where that is whole."""
    text = reshape_formula(view.source, view.target)
    if whole:
        left, right = (side.split() for side in text.split(" -> "))
        gone = {left[dim] for dim in whole if dim < len(view.source)} - {"1"}
        left, right = (["_" if item in gone else item for item in side] for side in (left, right))
        text = f"{' '.join(left)} -> {' '.join(right)}"
    return text


def _items_of(view: View, left: _Items) -> _Items:
    """The items of a result: the labels of the dims that it shows as they are."""
    dims = {view.keeps(dim): label for dim, label in enumerate(left)}
    inserted = [
        not any(row[e] for row in view.rows or ()) and size == 1 for e, size in enumerate(view.target)
    ]
    return [dims.get(e, "1" if new else "_") for e, new in enumerate(inserted)]


def _cut_inside(call: Call, seen: list[View]) -> int | None:
    """The dim of which the results are equal parts: if each of them is cut alike, so is the dim."""
    if len(seen) == 1 or "split_size" not in call.bound:
        return None
    return call.arg("dim") % len(_shape(call)) if len({view.target for view in seen}) == 1 else None


def _whole_dims(call: Call) -> frozenset[int]:
    """Dims of which a rank's call, with the same arguments, would show something else.

    A part may have size 1 where the dim has not, and then `squeeze` would drop it; bounds of a slice are
    right for a part if they leave nothing out; a part is split at other indices.
    """
    op, shape = call.op._schema.name, _shape(call)
    if op.startswith("aten::squeeze") or "split" in op:
        named = call.arg("dim")
        return frozenset(
            dim % max(1, len(shape)) for dim in (named if isinstance(named, tuple) else (named,))
        )
    if op.startswith("aten::slice") and not (call.arg("step") == 1 and _open(call, shape[call.arg("dim")])):
        return frozenset({call.arg("dim") % len(shape)})
    return frozenset()


def _open(call: Call, size: int) -> bool:
    """Whether the bounds are right for a part of the dim too."""
    start, end = call.arg("start"), call.arg("end")
    return start in {None, 0} and (end is None or end >= size)


@rewrite("aten::_reshape_alias")
def reshape_alias(_op: object, x: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """A reshape where it has these strides: those of a local tensor are not told by them."""
    memory = torch.empty_strided(x.shape, x.stride(), device="meta")
    if tuple(memory.view(size).stride()) == tuple(stride):
        return x.view(size)
    return x.as_strided(size, stride)


@rewrite("aten::squeeze.default")
def squeeze_all(_op: object, x: torch.Tensor) -> torch.Tensor:
    """Squeeze the dims that are 1 logically: a dim that is 1 on one rank only must stay."""
    dims = [dim for dim, size in enumerate(x.shape) if size == 1]
    return x.squeeze(dims) if dims else torch.ops.aten.alias.default(x)


rule("aten::flip", "...[dims:_] -> ...[dims:_]", hom=_KEEP)
rule("aten::roll", "...[dims:_] -> ...[dims:_]", hom=_KEEP)
rule("aten::tril", "... _ _ -> ... _ _", hom=_KEEP)
rule("aten::triu", "... _ _ -> ... _ _", hom=_KEEP)


@register_rule("aten::slice_backward", "aten::slice_scatter", "aten::select_scatter")
def embed_slice(call: Call) -> Formula:
    """A part is put into zeros, or into another tensor, along a dim that must be whole."""
    rank = len(_result_shape(call))
    dim = call.arg("dim") % rank
    labels = letters(rank)
    full = [*labels[:dim], "_", *labels[dim + 1 :]]
    if "index" not in call.bound and _all_of_it(call, dim):
        full = labels
    if "input_sizes" in call.bound:
        return formula(join([full], [full]), hom="grad_output: *", shapes={"input_sizes": "@0"})
    part = [*labels[:dim], *labels[dim + 1 :]] if "index" in call.bound else full
    return formula(join([full, part], [full]), hom="self+src: *")


def _all_of_it(call: Call, dim: int) -> bool:
    """Whether the slice is the whole dim, with bounds that are right for a part of it too."""
    size = _result_shape(call)[dim]
    return call.operands[-1].shape[dim] == size and call.arg("step") == 1 and _open(call, size)


@register_rule("aten::select_backward", "aten::unfold_backward", "aten::diagonal_backward")
def embed_select(call: Call) -> Formula | None:
    """The gradient of what was selected, put into zeros."""
    rank = len(_result_shape(call))
    labels = letters(rank)
    if "index" in call.bound:
        dim = call.arg("dim") % rank
        full = [*labels[:dim], "_", *labels[dim + 1 :]]
        part = [*labels[:dim], *labels[dim + 1 :]]
        return formula(join([part], [full]), hom="grad_output: *", shapes={"input_sizes": "@0"})
    if "dim1" in call.bound:
        dims = {call.arg("dim1") % rank, call.arg("dim2") % rank}
        full = ["_" if dim in dims else label for dim, label in enumerate(labels)]
        part = [label for dim, label in enumerate(labels) if dim not in dims]
        return formula(join([[*part, "_"]], [full]), hom="grad_output: *", shapes={"input_sizes": "@0"})
    return None


@register_rule("aten::diagonal_scatter")
def embed_diagonal(call: Call) -> Formula:
    """A diagonal is put into another tensor along two dims that must be whole."""
    labels = letters(len(_shape(call)))
    dims = {call.arg("dim1") % len(labels), call.arg("dim2") % len(labels)}
    full = ["_" if dim in dims else label for dim, label in enumerate(labels)]
    part = [label for dim, label in enumerate(labels) if dim not in dims]
    return formula(join([full, [*part, "_"]], [full]), hom="self+src: *")


@register_rule("aten::repeat")
def repeat(call: Call) -> Formula:
    """Dims that are repeated are whole, the others (a count of 1) keep their cut."""
    source, counts = _shape(call), tuple(call.arg("repeats"))
    added = len(counts) - len(source)
    pairs = zip(letters(len(source)), counts[added:], strict=True)
    left = [label if count == 1 else "_" for label, count in pairs]
    right = ["_"] * added + left
    return formula(join([left], [right]), hom=_KEEP)


@register_rule("aten::constant_pad_nd")
def pad(call: Call) -> Formula:
    """Padded dims are whole."""
    amounts = tuple(call.arg("pad"))
    rank = len(_shape(call))
    padded = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    items = ["_" if dim in padded else f"a{dim}" for dim in range(rank)]
    facts = _KEEP if call.arg("value") == 0 else ("self: max->max, min->min, avg->avg",)
    return formula(join([items], [items]), hom=facts)
