"""Writes that one device refuses because of memory: into elements that are one place, or over what is read.

torch asks the memory of the tensors that its kernel sees. Here these are local parts, which may be copies,
may have moved, or be empty: some ranks would raise, and some compute. So the question is put to the logical
tensors, before anything runs, and every rank has the same answer.

Which ops ask what is torch's habit, not a law: the tables below are checked against plain torch, op by op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from shardwright.compat.dynamo import compute_overlapping_tensors
from shardwright.errors import RuleError
from shardwright.remember import remembered
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_pointwise
from shardwright.tensor.dispatch import overlapping
from shardwright.tensor.dispatch.overlapping import is_cut_there, writes_once
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.views.write_back import bases_of, written_by
from shardwright.tensor.wrap import local_part, offset_of

# Ops that read operands by index while they write: no place may be both.
_INDEXED = frozenset({
    "cat", "gather", "index", "index_add", "index_copy", "index_reduce", "index_select", "masked_select",
    "scatter", "scatter_add", "scatter_reduce", "stack", "take",
})  # fmt: skip
_ALONE = _INDEXED | {"index_put", "put"}
# Ops that are no pointwise ones and ask that a place is written once.
_ONCE = _INDEXED | {
    "addmm", "addmv", "addr", "baddbmm", "bernoulli", "bmm", "copy", "cumprod", "cumsum", "logcumsumexp",
    "masked_scatter", "mm", "put", "renorm",
}  # fmt: skip
# Ops that are no pointwise ones and ask that what they read is not a part of it, but may be it.
_PARTLY = frozenset({
    "addr", "bernoulli", "copy", "cumprod", "cumsum", "logcumsumexp", "masked_scatter", "renorm",
})  # fmt: skip
# Their `out=` gets what `self` holds before anything else, which a tensor gives to itself.
_COPY_SELF = frozenset({
    "index_add", "index_copy", "index_reduce", "scatter", "scatter_add", "scatter_reduce",
})  # fmt: skip
# Pointwise ones that make another tensor of what they read before they write.
_READ_BEFORE = frozenset({"ldexp"})
# Pointwise ones that ask nothing: every element of one place gets the same.
_TAKES_EXPANDED = frozenset({"masked_fill", "threshold"})
_FILLS_FROM = torch.ops.aten.fill_.Tensor  # asks that a place is written once; of a number it does not

_FEW = "more than one element of the written-to tensor refers to a single memory location"
_READ = "some elements of the input tensor and the written-to tensor refer to a single memory location"


@remembered(4096)
def _questions(func: Op) -> tuple[bool, bool, bool]:
    """Whether it refuses: places written twice, operands that lie partly in them, and wholly.

    A form that torch generates makes its result before it writes.
    """
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    if torch.Tag.generated in func.tags:
        return True, False, False
    pointwise = is_pointwise(func) and name not in _TAKES_EXPANDED
    partly = (pointwise and name not in _READ_BEFORE) or name in _PARTLY or name in _ALONE
    return pointwise or name in _ONCE or func is _FILLS_FROM, partly, name in _ALONE


def asks_of(func: Op, written: Sequence[DTensor]) -> bool:
    """Does `refuse` ask more of a call that writes these than what their specs say?"""
    if not written:
        return False
    return any(_questions(func)) or any(is_cut_there(x._spec.layout) for x in written)


def refuse(func: Op, args: Args, kwargs: Kwargs) -> None:
    """Raise what one device raises. Raises: RuleError (a RuntimeError): with the words of torch."""
    once, partly, wholly = questions = _questions(func)
    if not any(questions) and not func._schema.name.startswith("aten::index_put"):  # lists of parameters, say
        if any(is_cut_there(x._spec.layout) for x in written_by(func, args, kwargs)):
            _refuse_windows(func, args, kwargs)
        return
    read, written = _sides(func, args, kwargs)
    if func._schema.name == "aten::copy_" and read and written and _is_one_view(read[0], written[0]):
        return  # of itself: torch leaves before it asks
    if any(is_cut_there(x._spec.layout) for x in written):
        _refuse_windows(func, args, kwargs)
    if func._schema.name.startswith("aten::index_put"):  # a mask is made indices before anything is written
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        read = [x for x in read if x.dtype != torch.bool or not any(x is mask for mask in indices)]
    for target in written:
        if once and is_expanded(target):
            _raise(func, _FEW)
        base = _memory_of(target)
        for place, x in enumerate(read if partly else ()):
            apart = wholly and not (place == 0 and _copies_self(func))
            if (x is target and not apart) or _memory_of(x) is not base:
                continue
            found = _overlap(target, x)
            if found == "partly" or (found == "wholly" and apart):
                _raise(func, _READ)


def _refuse_windows(func: Op, args: Args, kwargs: Kwargs) -> None:
    if not writes_once(func, args, kwargs):
        overlapping.refuse(func)


@remembered(4096)
def _copies_self(func: Op) -> bool:
    """Is `self` read, and copied into what is written?"""
    name, first = func._schema.name.removeprefix("aten::"), func._schema.arguments[0]
    return name in _COPY_SELF and first.alias_info is None


# Products whose kernels read a factor while they write the result: of a single row, what they wrote.
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "addbmm"))


def keep_apart(func: Op, locals_: list[torch.Tensor], mutated: Sequence[int]) -> None:
    """Copy the local parts that are read and lie where another one is written.

    The logical tensors were asked already; between their elements may be gaps that a rank's few have not.
    """
    onto_itself = func._schema.name.rstrip("_") in _PRODUCTS
    for operand in mutated:
        target = locals_[operand]
        for index, x in enumerate(locals_):
            if index not in mutated and (onto_itself or x is not target) and _meet(target, x):
                locals_[index] = x.clone()


def _meet(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Does torch see a stretch of memory that is in both?"""
    if one.untyped_storage()._cdata != two.untyped_storage()._cdata:  # zeros without memory have no address
        return False
    starts = [x.storage_offset() for x in (one, two)]
    apart = starts[0] + one.numel() <= starts[1] or starts[1] + two.numel() <= starts[0]
    return not apart and _without_gaps(one) and _without_gaps(two)


def refuse_shared(args: Sequence[object], written: Sequence[int]) -> None:
    """Raises: RuleError: a graph writes an argument, and another one has some of its elements.

    The graph computes with what both had before. torch joins plain arguments that share memory, not those.
    """
    if not any(isinstance(x, DTensor) for x in args):
        return
    given = {place: x for place, x in enumerate(args) if isinstance(x, torch.Tensor) and _has_memory(x)}
    sharing: dict[int, dict[int, torch.Tensor]] = {}
    for place, x in given.items():
        base = _laid_in(x)
        sharing.setdefault(local_part(base).untyped_storage()._cdata, {})[place] = base
    for bases in sharing.values():
        if len(bases) > 1 and not bases.keys().isdisjoint(written):
            met = _met(given, bases)
            if not met.isdisjoint(written):
                raise RuleError(_SHARED.format(" and ".join(str(tuple(given[n].shape)) for n in sorted(met))))


def _met(given: Mapping[int, torch.Tensor], bases: Mapping[int, torch.Tensor]) -> set[int]:
    """Those of one storage that have elements in common: views of a tensor are asked as on one device.

    Others by what lies on this rank: a detached one, a local part. A storage without bytes is one part alone.
    """
    met: set[int] = set()
    views: dict[int, list[int]] = {}
    for place, base in bases.items():
        views.setdefault(id(base), []).append(place)
    for places in views.values():
        if isinstance(bases[places[0]], DTensor):
            met.update(_overlapping(places, [_as_memory(cast("DTensor", given[n])) for n in places]))
    if len(views) > 1:
        parts = {n: local_part(base if _is_apart(given[n], base) else given[n]) for n, base in bases.items()}
        empty = not any(part.untyped_storage().nbytes() for part in parts.values())
        found = set(parts) if empty else _overlapping(list(parts), list(parts.values()))
        if any(isinstance(given[n], DTensor) for n in found):  # torch joins plain ones
            met |= found
    return met


def _overlapping(places: Sequence[int], tensors: list[torch.Tensor]) -> set[int]:
    return {places[n] for n in compute_overlapping_tensors(tensors, symbolic=False)}


def _is_apart(x: torch.Tensor, base: torch.Tensor) -> bool:
    """Does what is laid in `base` lie elsewhere on this rank?"""
    own, its = (local_part(one).untyped_storage()._cdata for one in (x, base))
    return bool(own != its)


def _has_memory(x: torch.Tensor) -> bool:
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return isinstance(x, DTensor) or (plain and x.layout is torch.strided)


def _laid_in(x: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory it is in, or says to be; of views in inference mode torch knows no base."""
    if not isinstance(x, DTensor):
        return x
    *_, base = (x, *bases_of(x))
    return base if base.is_inference() else _memory_of(base)


def _as_memory(x: DTensor) -> torch.Tensor:
    """Without data, what places of a memory a tensor has."""
    return torch.empty(0, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), offset_of(x))


_SHARED = (
    "a compiled function writes a DTensor among its arguments, and another has elements of it (shapes {}): "
    "its graph would compute with what was there before\n"
    "  fix: clone() one of them before the call, or take views inside of what is compiled"
)


def _sides(func: Op, args: Args, kwargs: Kwargs) -> tuple[list[DTensor], list[DTensor]]:
    """The operands that are read, lists included, and those that are written."""
    read: list[DTensor] = []
    written: list[DTensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        side = written if argument.alias_info is not None and argument.alias_info.is_write else read
        side.extend(
            x for x in (value if isinstance(value, list | tuple) else (value,)) if isinstance(x, DTensor)
        )
    return read, written


def is_expanded(x: torch.Tensor) -> bool:
    """Are several elements one place? Of no elements none are, whatever the strides say."""
    return x.numel() > 0 and any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))


def _is_one_view(one: DTensor, two: DTensor) -> bool:
    if one is two:
        return True
    views = [(_memory_of(x), x.dtype, tuple(x.shape), x.stride(), offset_of(x)) for x in (one, two)]
    return views[0][0] is views[1][0] and views[0][1:] == views[1][1:]


def share_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Are they views of one tensor, or the same one?"""
    return _memory_of(one) is _memory_of(two)


def _memory_of(x: torch.Tensor) -> torch.Tensor:
    return x if x._base is None else x._base


def _overlap(one: DTensor, two: DTensor) -> str:
    """How two views of one base lie, as far as torch asks: only tensors without gaps are asked."""
    if one is two:  # asked first: also of no elements
        return "wholly"
    if not one.numel() or not two.numel() or not (_without_gaps(one) and _without_gaps(two)):
        return ""
    starts = [offset_of(x) for x in (one, two)]
    if starts[0] == starts[1] and one.numel() == two.numel():
        return "wholly" if one.stride() == two.stride() else "partly"
    apart = starts[0] + one.numel() <= starts[1] or starts[1] + two.numel() <= starts[0]
    return "" if apart else "partly"


def _without_gaps(x: torch.Tensor) -> bool:
    """Does it lie in one stretch of its base, each place once?"""
    place = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride != place:
            return False
        place *= size
    return True


def _raise(func: Op, why: str) -> None:
    raise RuleError(
        f"{func.name()}: unsupported operation: {why}, on one device too\n  fix: clone() the tensor before"
    )
