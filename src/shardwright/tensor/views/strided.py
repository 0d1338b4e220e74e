"""`as_strided` and its relatives: whatever stays inside a tensor's memory is a view of its dims.

Places are those of the logical tensor. A tensor that is a view is asked for its base where it has not all of
the places.

Where a gradient is wanted, the view is taken as narrows, windows and diagonals, which autograd differentiates
one by one: torch's own gradient of `as_strided` scatters into a storage, and would gather.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.errors import RuleError
from shardwright.index.region import Shape
from shardwright.index.view import View
from shardwright.remember import remembered
from shardwright.rules.call import Args, Call, Kwargs, Op, TensorInfo
from shardwright.rules.catalog.view_maps import strided_views, views_of
from shardwright.rules.op import copies
from shardwright.tensor.dispatch.metadata import infos_of
from shardwright.tensor.dispatch.ways.algorithm import finished
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import move_unasked
from shardwright.tensor.plain.boundary import Own
from shardwright.tensor.spec import Token, spec_of
from shardwright.tensor.views import write_back
from shardwright.tensor.views.take import ViewCall, view_call
from shardwright.tensor.wrap import base_of, offset_of, wrap

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------ the memory


def _base(x: torch.Tensor) -> DTensor | None:
    """The tensor of which `x` is a view of equal elements; None if it is none, or torch does not know it."""
    if torch.compiler.is_compiling():
        return None
    base = base_of(x)
    return base if isinstance(base, DTensor) and base.dtype == x.dtype else None


def _inside(x: DTensor, size: Shape, stride: Shape, offset: int | None) -> int | None:
    """The first place that a view sees, counted in `x`; None if `x` has not all places that it sees."""
    place = 0 if offset is None else offset - offset_of(x)
    seen = strided_views(tuple(x.shape), tuple(x._spec.layout.stride), size, stride, place)
    return None if seen is None else place


def _placed(x: DTensor, size: Shape, stride: Shape, offset: int | None) -> tuple[DTensor, int, int]:
    """The tensor that has all these places, `x` or its base; the first of them in it, and in the storage.

    Raises: RuleError: neither has them.
    """
    own = offset_of(x)
    place = _inside(x, size, stride, offset)
    if place is not None:
        return x, place, place + own
    base, first = _base(x), own if offset is None else offset
    place = None if base is None else _inside(base, size, stride, first)
    if base is None or place is None:
        raise RuleError(_leaves(x, size, stride, offset))
    return base, place, first


def _leaves(x: DTensor, size: Shape, stride: Shape, offset: int | None) -> str:
    own = offset_of(x)
    return (
        f"as_strided: size {size}, stride {stride}, storage offset {own if offset is None else offset} leave "
        f"the elements of a DTensor of shape {tuple(x.shape)}, stride {tuple(x._spec.layout.stride)}, "
        f"storage offset {own}\n  fix: take the view of the tensor that has these elements"
    )


# ------------------------------------------------------------------------------------------- the op


def as_strided(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The view, or its copy: every rank takes what it holds of it.

    Raises: RuleError: it leaves the memory of the tensor and of its base.
    Cost: none, or gathering a tensor of which too many elements would have to be listed, with a record.
    """
    given, size, stride, offset = _bound(func, args, kwargs)
    x, place, first = _placed(given, size, stride, offset)
    called = (x, size, stride, first)
    decided = _decided(func, x._spec.token, size, stride, place)
    if decided is not None:
        out = decided.run(func, called, {}, [x])
        if x is not given and not copies(func):  # a view of the base, and not of its view that was given
            write_back.remember(out, func, called, {}, copied=False)
        return out
    whole = _gathered(func, x)
    out = _known(_decided(func, whole._spec.token, size, stride, place)).run(func, called, {}, [whole])
    if not copies(func):
        write_back.remember(out, func, called, {}, copied=True)
    return out


def as_strided_scatter(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """A copy of a tensor, with other values where the view sees it.

    Raises: RuleError: the view leaves the memory of the tensor.
    Cost: what brings the values to where the view has them; nothing if they are there.
    """
    given, values, size, stride, offset = _bound(func, args, kwargs)
    x, values = finished(given, func.name()), finished(values, func.name())
    place = _inside(given, size, stride, offset)
    if place is None:
        raise RuleError(_leaves(given, size, stride, offset))
    decided = _decided(aten.as_strided.default, x._spec.token, size, stride, place)
    if decided is None:
        x = _gathered(func, x)
        decided = _known(_decided(aten.as_strided.default, x._spec.token, size, stride, place))
    local, target = x._local_tensor.clone(), decided.results[0].layout.with_shape(size, dtype=values.dtype)
    moved = move_unasked(func.name(), values, target, "put where the tensor has it")
    if x._spec.coords is not None:
        decided.locals[0].put(local, moved)
    return wrap(local, x._spec)


def _bound(func: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    """All arguments, sizes and strides as tuples."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    values = [given.get(argument.name) for argument in func._schema.arguments]
    return [tuple(value) if isinstance(value, list | tuple) else value for value in values]


@remembered(8192)
def _decided(func: Op, token: Token, size: Shape, stride: Shape, place: int) -> ViewCall | None:
    spec = token.spec
    layout = spec.layout
    info = TensorInfo(tuple(layout.shape), tuple(layout.stride), layout.dtype)
    args = (info, size, stride, place)
    call = Call(func, args, (), infos_of(func, args, {}))
    chains = views_of(call)
    return None if chains is None else view_call(func, call, chains, layout, spec.mesh, spec.use)


def _known(decided: ViewCall | None) -> ViewCall:
    if decided is None:
        raise RuleError("as_strided: not even a view of the whole tensor")
    return decided


def _gathered(func: Op, x: DTensor) -> DTensor:
    target = x._spec.layout.replicated()
    whole = move_unasked(func.name(), x, target, "too many elements to list where each is")
    return wrap(whole, spec_of(target, x.device_mesh, x._spec.use))


# ----------------------------------------------------------------------------------------- autograd


def taken_apart(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """`as_strided` and `as_strided_copy` as the user calls them: other views, where a gradient is wanted."""
    x, size, stride, offset = _bound(aten.as_strided.default, args, _renamed(kwargs))
    if not isinstance(x, DTensor) or not x.requires_grad or not torch.is_grad_enabled():
        return func(*args, **kwargs)
    place = _inside(x, size, stride, offset)
    if place is None:
        raise RuleError(_leaves(x, size, stride, offset))
    out: torch.Tensor = x
    for view in strided_views(tuple(x.shape), tuple(x._spec.layout.stride), size, stride, place) or ():
        out = as_torch_views(view, out)
    return out.clone(memory_format=torch.contiguous_format) if func in _COPYING else out


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """By the names of the operator's schema."""
    return {"self" if name == "input" else name: value for name, value in kwargs.items()}


def as_torch_views(view: View, x: torch.Tensor) -> torch.Tensor:
    """What a view sees, by views of torch that have gradients of their own: windows, diagonals, ..."""
    if view.rows is None:
        return x.reshape(view.target)
    if view.empty:
        return x.flatten()[:0].view(view.target)
    dims: list[int] = []  # the target dim that each dim is by now
    for base, row in zip(view.base, view.rows, strict=True):
        targets = sorted((e for e, step in enumerate(row) if step), key=lambda e: -row[e])
        x = _windows(x, len(dims), base, [(row[e], view.target[e]) for e in targets])
        dims += targets
    for e in range(len(view.target)):
        while dims.count(e) > 1:
            one = dims.index(e)
            two = dims.index(e, one + 1)
            x = x.diagonal(0, one, two)
            dims = [d for at, d in enumerate(dims) if at not in {one, two}] + [e]
    x = x.permute(sorted(range(len(dims)), key=lambda at: dims[at]))
    for e in range(len(view.target)):
        x = x if e in dims else x.unsqueeze(e)
    return x.expand(view.target)


def _windows(x: torch.Tensor, dim: int, base: int, steps: list[tuple[int, int]]) -> torch.Tensor:
    """A dim from `base`, as one dim for each `(step, size)`, the largest step first; none: one index."""
    if not steps:
        return x.select(dim, base)
    reach = [1 + sum(step * (size - 1) for step, size in steps[at:]) for at in range(len(steps))]
    x = x.narrow(dim, base, reach[0])
    for at, (step, _) in enumerate(steps[:-1]):
        x = x.unfold(dim + at, reach[at + 1], step).movedim(-1, dim + at + 1)
    last = dim + len(steps) - 1
    return x if steps[-1][0] == 1 else x[(slice(None),) * last + (slice(None, None, steps[-1][0]),)]


_COPYING = frozenset({torch.as_strided_copy, aten.as_strided_copy, aten.as_strided_copy.default})
_VIEWING = (torch.as_strided, torch.Tensor.as_strided, aten.as_strided, aten.as_strided.default)
OWN: dict[Any, Own] = dict.fromkeys((*_VIEWING, *_COPYING), taken_apart)


STRIDED = {
    torch.ops.aten.as_strided.default: as_strided,
    torch.ops.aten.as_strided_copy.default: as_strided,
    torch.ops.aten.as_strided_scatter.default: as_strided_scatter,
}
