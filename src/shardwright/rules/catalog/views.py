"""Views: they rename elements, so a cut stays a cut of the same elements, and any pending value stays."""

from __future__ import annotations

import torch

from shardwright.rules.call import Call
from shardwright.rules.catalog.labels import join, letters
from shardwright.rules.catalog.reshaping import reshape_formula
from shardwright.rules.formula import Formula, formula
from shardwright.rules.registry import rewrite
from shardwright.rules.rule import register_rule, rule

_KEEP = ("self: *",)


def _shape(call: Call) -> tuple[int, ...]:
    shape: tuple[int, ...] = call.arg("self").shape
    return shape


def _result_shape(call: Call) -> tuple[int, ...]:
    result = call.results[0]
    return () if result is None else result.shape


@register_rule("aten::view", "aten::_unsafe_view")
def view(call: Call) -> Formula | None:
    """Dims split and merged by their common factors. A view as another dtype is none of these."""
    if "size" not in call.bound:
        return None
    text = reshape_formula(_shape(call), _result_shape(call))
    return formula(text, hom=_KEEP, shapes={"size": "@0"})


@rewrite("aten::_reshape_alias")
def reshape_alias(_op: object, x: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """A reshape where it has these strides: those of a local tensor are not told by them."""
    memory = torch.empty_strided(x.shape, x.stride(), device="meta")
    if tuple(memory.view(size).stride()) == tuple(stride):
        return x.view(size)
    return x.as_strided(size, stride)


@register_rule("aten::view_as_real")
def view_as_real(call: Call) -> Formula:  # noqa: ARG001  every call alike
    """One more dim, of size 2."""
    return formula("... -> ... _", hom="self: sum->sum")


rule("aten::view_as_complex", "... _ -> ...", hom="self: sum->sum")


@register_rule("aten::expand")
def expand(call: Call) -> Formula:
    """New dims, and dims of size 1 that are repeated, are whole."""
    source, target = _shape(call), _result_shape(call)
    added = len(target) - len(source)
    left = letters(len(source))
    right = ["_"] * added + [
        label if size == wanted else "_"
        for label, size, wanted in zip(left, source, target[added:], strict=True)
    ]
    return formula(join([left], [right]), hom=_KEEP, shapes={"size": "@0"})


@register_rule("aten::permute", any_size=True)
def permute(call: Call) -> Formula:
    """The labels change places."""
    labels = letters(len(_shape(call)))
    return formula(join([labels], [[labels[dim] for dim in call.arg("dims")]]), hom=_KEEP)


@register_rule("aten::transpose", any_size=True)
def transpose(call: Call) -> Formula:
    """Two labels change places."""
    left = letters(len(_shape(call)))
    right = list(left)
    if left:
        one, two = call.arg("dim0"), call.arg("dim1")
        right[one], right[two] = right[two], right[one]
    return formula(join([left], [right]), hom=_KEEP)


@register_rule("aten::t", any_size=True)
def transpose_last(call: Call) -> Formula:
    """The last two labels change places; one dim stays."""
    labels = letters(len(_shape(call)))
    return formula(join([labels], [[*labels[:-2], *reversed(labels[-2:])]]), hom=_KEEP)


@register_rule("aten::unsqueeze", any_size=True)
def unsqueeze(call: Call) -> Formula:
    """A dim of size 1 appears."""
    labels = letters(len(_shape(call)))
    dim = call.arg("dim") % (len(labels) + 1)
    return formula(join([labels], [[*labels[:dim], "1", *labels[dim:]]]), hom=_KEEP)


@register_rule("aten::squeeze.dim", "aten::squeeze.dims")
def squeeze_dims(call: Call) -> Formula:
    """Named dims of size 1 vanish. A dim that is 1 only locally is kept whole, else it would vanish too."""
    shape = _shape(call)
    rank = max(1, len(shape))
    named = call.arg("dim")
    dims = {dim % rank for dim in (named if isinstance(named, tuple) else (named,))}
    items = ["_" if dim in dims else f"a{dim}" for dim in range(len(shape))]
    right = [item for dim, item in enumerate(items) if dim not in dims or shape[dim] != 1]
    return formula(join([items], [right]), hom=_KEEP)


@rewrite("aten::squeeze.default")
def squeeze_all(_op: object, x: torch.Tensor) -> torch.Tensor:
    """Squeeze the dims that are 1 logically: a dim that is 1 on one rank only must stay."""
    dims = [dim for dim, size in enumerate(x.shape) if size == 1]
    return x.squeeze(dims) if dims else torch.ops.aten.alias.default(x)


@register_rule("aten::slice.Tensor")
def slice_(call: Call) -> Formula:
    """The sliced dim is whole, unless all of it is taken."""
    shape = _shape(call)
    labels = letters(len(shape))
    dim = call.arg("dim") % len(shape)
    whole = _result_shape(call)[dim] == shape[dim] and call.arg("step") == 1 and _open(call, shape[dim])
    left = labels if whole else [*labels[:dim], "_", *labels[dim + 1 :]]
    return formula(join([left], [left]), hom=_KEEP)


def _open(call: Call, size: int) -> bool:
    """Whether the bounds are right for a part of the dim too."""
    start, end = call.arg("start"), call.arg("end")
    return start in {None, 0} and (end is None or end >= size)


rule("aten::select.int", "...[dim:_] -> ...[dim:]", hom=_KEEP)
rule("aten::unfold", "...[dimension:_] -> ...[dimension:_] _", hom=_KEEP)
rule("aten::flip", "...[dims:_] -> ...[dims:_]", hom=_KEEP)
rule("aten::roll", "...[dims:_] -> ...[dims:_]", hom=_KEEP)
rule("aten::tril", "... _ _ -> ... _ _", hom=_KEEP)
rule("aten::triu", "... _ _ -> ... _ _", hom=_KEEP)


@register_rule("aten::diagonal")
def diagonal(call: Call) -> Formula:
    """Both dims are whole; the diagonal is a new last dim."""
    rank = len(_shape(call))
    dims = {call.arg("dim1") % rank, call.arg("dim2") % rank}
    items = ["_" if dim in dims else f"a{dim}" for dim in range(rank)]
    rest = [item for dim, item in enumerate(items) if dim not in dims]
    return formula(join([items], [[*rest, "_"]]), hom=_KEEP)


@register_rule("aten::split.Tensor", "aten::split_with_sizes", "aten::unsafe_split")
def split(call: Call) -> Formula:
    """Parts of a dim. Equal parts of a dim that is cut inside each part (`(3 h)`) are cut like `h`."""
    shape = _shape(call)
    dim = call.arg("dim") % len(shape)
    parts = [info.shape[dim] for info in call.results if info is not None]
    labels = letters(len(shape))
    if len(set(parts)) == 1 and len(parts) > 1 and "split_size" in call.bound:
        left = [*labels[:dim], f"({len(parts)} h)", *labels[dim + 1 :]]
        right = [*labels[:dim], "h", *labels[dim + 1 :]]
        return formula(join([left], [right] * len(parts)), hom=_KEEP, ints={"split_size": "h"})
    whole = [*labels[:dim], "_", *labels[dim + 1 :]]
    return formula(join([whole], [whole] * len(parts)), hom=_KEEP)


@register_rule("aten::unbind")
def unbind(call: Call) -> Formula:
    """The dim is whole and vanishes."""
    labels = letters(len(_shape(call)))
    dim = call.arg("dim") % len(labels)
    left = [*labels[:dim], "_", *labels[dim + 1 :]]
    right = [*labels[:dim], *labels[dim + 1 :]]
    return formula(join([left], [right] * len(call.results)), hom=_KEEP)


@register_rule("aten::as_strided")
def as_strided(call: Call) -> Formula | None:
    """Only the one that changes nothing."""
    info = call.arg("self")
    same = tuple(call.arg("size")) == info.shape and tuple(call.arg("stride")) == info.stride
    if not same or call.arg("storage_offset") not in {None, 0}:
        return None
    return formula("... -> ...", hom=_KEEP, shapes={"size": "@0"}, strides=("stride",))


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
