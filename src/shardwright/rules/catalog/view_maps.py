"""ATen's views as `View`s, one per result, and the gradients of views as the view that they undo."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from shardwright.index.region import Shape
from shardwright.index.stride import contiguous_stride
from shardwright.index.view import (
    View,
    diagonal,
    expanded,
    identity,
    inserted,
    permuted,
    reshaped,
    selected,
    sliced,
    strided,
    unfolded,
)
from shardwright.remember import remembered
from shardwright.rules.call import Call

Chains = list[tuple[View, ...]]
Describe = Callable[[Call], "list[View] | Chains | None"]


def views_of(call: Call, *, or_out: bool = False) -> Chains | None:
    """What each result of a call sees of its first argument, as views one after another.

    None if the call is no view, or is not known. or_out: also for a form that copies what it sees into `out`.
    """
    describe = _VIEWS.get(_base(call.op))
    if describe is None or not (or_out or len(call.operands) == 1) or None in call.results:
        return None
    found = describe(call)
    if found is None:
        return None
    chains = [entry if isinstance(entry, tuple) else (entry,) for entry in found]
    return chains if _agree(chains, call) else None


@remembered(4096)
def is_described(op: torch._ops.OpOverload) -> bool:
    """Whether the op may be a view that `views_of` knows."""
    return _base(op) in _VIEWS


def _base(op: torch._ops.OpOverload) -> str:
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "aten" or op._schema.overload_name == "dtype":
        return ""
    return name.removesuffix("_copy").removeprefix("unsafe_")


def _agree(found: Chains, call: Call) -> bool:
    shapes = [() if info is None else tuple(info.shape) for info in call.results]
    return [views[-1].target for views in found] == shapes


def _shape(call: Call) -> Shape:
    return tuple(call.operands[0].shape)


def _results(call: Call) -> list[Shape]:
    return [() if info is None else tuple(info.shape) for info in call.results]


def _dim(call: Call, name: str = "dim") -> int:
    return int(call.arg(name)) % max(len(_shape(call)), 1)


def _identity(call: Call) -> list[View]:
    return [identity(_shape(call))]


def _reshape(call: Call) -> list[View]:
    return [reshaped(_shape(call), _results(call)[0])]


def _permute(call: Call) -> list[View]:
    shape = _shape(call)
    return [permuted(shape, tuple(dim % max(len(shape), 1) for dim in call.arg("dims")))]


def _transpose(call: Call) -> list[View]:
    shape = _shape(call)
    dims = list(range(len(shape)))
    if shape:
        one, two = (int(call.arg(name)) % len(shape) for name in ("dim0", "dim1"))
        dims[one], dims[two] = dims[two], dims[one]
    return [permuted(shape, tuple(dims))]


def _t(call: Call) -> list[View]:
    shape = _shape(call)
    return [permuted(shape, tuple(reversed(range(len(shape)))))]


def _unsqueeze(call: Call) -> list[View]:
    shape = _shape(call)
    return [inserted(shape, int(call.arg("dim")) % (len(shape) + 1))]


def _slice(call: Call) -> list[View]:
    return [_of_slice(call, _shape(call), _results(call)[0])]


def _of_slice(call: Call, shape: Shape, part: Shape) -> View:
    dim = int(call.arg("dim")) % len(shape)
    start, size = call.arg("start"), shape[dim]
    first = 0 if start is None else int(start)
    first = min(max(first + size if first < 0 else first, 0), size)
    return sliced(shape, dim, first, int(call.arg("step")), part[dim])


def _select(call: Call) -> list[View]:
    shape, dim, index = _shape(call), _dim(call), int(call.arg("index"))
    return [selected(shape, dim, index % shape[dim])]


def _split(call: Call) -> list[View]:
    shape, dim = _shape(call), _dim(call)
    found, start = [], 0
    for result in _results(call):
        found.append(sliced(shape, dim, start, 1, result[dim]))
        start += result[dim]
    return found


def _unbind(call: Call) -> list[View]:
    shape, dim = _shape(call), _dim(call)
    return [selected(shape, dim, index) for index in range(shape[dim])]


def _unfold(call: Call) -> list[View]:
    return [unfolded(_shape(call), _dim(call, "dimension"), int(call.arg("size")), int(call.arg("step")))]


def _diagonal(call: Call) -> list[View]:
    length = _results(call)[0][-1]
    return [diagonal(_shape(call), int(call.arg("offset")), _dim(call, "dim1"), _dim(call, "dim2"), length)]


def _strided(call: Call) -> Chains | None:
    info, offset = call.operands[0], call.arg("storage_offset")
    where = tuple(call.arg("size")), tuple(call.arg("stride")), int(offset or 0)
    found = strided_views(tuple(info.shape), tuple(info.stride), *where)
    return None if found is None else [found]


def strided_views(
    shape: Shape, own: Shape, size: Shape, stride: Shape, offset: int
) -> tuple[View, ...] | None:
    """`as_strided` of a tensor that lies with strides `own` from place 0, as views one after another.

    A view of the dims as they are, or of the memory, where an index would carry from one into the next; None
    where it leaves the tensor's elements.
    """
    found = strided(shape, own, size, stride, offset)
    if found is not None:
        return (found,)
    kept = [dim for dim, extent in enumerate(shape) if extent != 1]
    ones = [dim for dim, extent in enumerate(shape) if extent == 1]
    outer_first = (*ones, *sorted(kept, key=lambda d: own[d], reverse=True))
    lying = permuted(shape, outer_first)
    dense = contiguous_stride(lying.target)
    if any(own[dim] != dense[at] for at, dim in enumerate(outer_first) if shape[dim] != 1):
        return None
    memory = reshaped(lying.target, (prod(shape),))
    picked = strided(memory.target, (1,), size, stride, offset)
    return None if picked is None else (lying, memory, picked)


def _as_complex(call: Call) -> list[View]:
    shape = _shape(call)
    return [selected(shape, len(shape) - 1, 0)]


def _as_real(call: Call) -> list[View]:
    shape = _shape(call)
    view = identity(shape)
    return [View(shape, (*shape, 2), view.base, tuple((*row, 0) for row in view.rows or ()))]


_VIEWS: dict[str, Describe] = {
    "_conj": _identity,
    "_neg_view": _identity,
    "_unsafe_view": _reshape,
    "alias": _identity,
    "as_strided": _strided,
    "detach": _identity,
    "diagonal": _diagonal,
    "expand": lambda call: [expanded(_shape(call), _results(call)[0])],
    "permute": _permute,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _reshape,
    "t": _t,
    "transpose": _transpose,
    "unbind": _unbind,
    "unfold": _unfold,
    "unsqueeze": _unsqueeze,
    "view": _reshape,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}

# Views that change what an element is: the local result is the op itself on the local tensor.
ON_ELEMENTS = frozenset({"_conj", "_neg_view", "view_as_complex", "view_as_real"})


@remembered(4096)
def on_elements(op: torch._ops.OpOverload) -> bool:
    """Whether the local result of a view is the op itself on the local tensor."""
    return _base(op) in ON_ELEMENTS


def undone_by(call: Call) -> View | None:
    """The view whose gradient a call computes, or through which it writes; None for any other op."""
    undo = _UNDONE.get(call.op._schema.name.partition("::")[2])
    return None if undo is None else undo(call)


def _whole_shape(call: Call) -> Shape:
    return _results(call)[0]


def _undo_slice(call: Call) -> View:
    return _of_slice(call, _whole_shape(call), tuple(call.operands[-1].shape))


def _undo_select(call: Call) -> View:
    shape = _whole_shape(call)
    dim = int(call.arg("dim")) % len(shape)
    return selected(shape, dim, int(call.arg("index")) % shape[dim])


def _undo_unfold(call: Call) -> View:
    shape = _whole_shape(call)
    dim = int(call.arg("dim")) % max(len(shape), 1)
    return unfolded(shape, dim, int(call.arg("size")), int(call.arg("step")))


def _undo_diagonal(call: Call) -> View:
    shape = _whole_shape(call)
    one, two = (int(call.arg(name)) % len(shape) for name in ("dim1", "dim2"))
    return diagonal(shape, int(call.arg("offset")), one, two, tuple(call.operands[-1].shape)[-1])


def _undo_expand(call: Call) -> View | None:
    """A sum that keeps its dims is the gradient of an expansion."""
    shape, summed = _whole_shape(call), _shape(call)
    return expanded(shape, summed) if call.bound.get("keepdim") and len(shape) == len(summed) else None


_UNDONE: dict[str, Callable[[Call], View | None]] = {
    "diagonal_backward": _undo_diagonal,
    "diagonal_scatter": _undo_diagonal,
    "select_backward": _undo_select,
    "select_scatter": _undo_select,
    "slice_backward": _undo_slice,
    "slice_scatter": _undo_slice,
    "sum": _undo_expand,
    "unfold_backward": _undo_unfold,
}


@remembered(4096)
def undoes(op: torch._ops.OpOverload) -> bool:
    """Whether the op puts what views see into a whole: `undone_by` or `joined_views` knows it."""
    name = op._schema.name.partition("::")[2]
    functional = not any(result.alias_info is not None for result in op._schema.returns)
    return functional and (name in _UNDONE or name in {"cat", "stack"})


@remembered(4096)
def gives_back(op: torch._ops.OpOverload) -> bool:
    """Whether the op puts what one view sees into a whole of zeros: the gradient of a view."""
    return undoes(op) and op._schema.name.endswith("_backward")


def joined_views(call: Call) -> list[View] | None:
    """The views of its result that the operands of `cat` and `stack` are; None for any other op."""
    name = call.op._schema.name
    if name not in {"aten::cat", "aten::stack"} or call.op._schema.overload_name or not call.results:
        return None
    shape = _whole_shape(call)
    if not shape or 0 in shape:
        return None
    dim = int(call.arg("dim")) % len(shape)
    if name == "aten::stack":
        return [selected(shape, dim, index) for index in range(shape[dim])]
    found, start = [], 0
    for operand in call.operands:
        if len(operand.shape) != len(shape):
            return None
        found.append(sliced(shape, dim, start, 1, operand.shape[dim]))
        start += operand.shape[dim]
    return found
