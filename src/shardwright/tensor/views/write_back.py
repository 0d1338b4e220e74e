"""Views whose local result is a copy (every other row of an interleaved cut, say): writes still travel.

Such a view does not share the base's local tensor. It remembers its base: a write into it is written back,
and after a write into the base it is derived again before its next use. Both are what the single-device
program does. Where each rank copied its own elements neither communicates; where the view had to move data
both cost what deriving it cost.

Rejected: raising on such writes. `x[2] = 0` and `x[:, 1:3].mul_(2)` are common and have a clear meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.comm.traced import is_traced
from shardwright.compat import neg_view, tree_leaves, version_of
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.remember import remembered
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_view
from shardwright.tensor.dispatch.overlapping import overlaps, refuse
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.move import announce, move_asked
from shardwright.views.local import carried_out

Call = Callable[[Op, tuple[Any, ...], Mapping[str, Any]], Any]


class LocalCopy(Protocol):
    """Knows where in the base's local tensor the elements of a copy are."""

    @property
    def overlaps(self) -> bool:
        """May an element of the base be in the copy more than once?"""

    def take(self, local: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Them, of a local tensor; and whether that is a copy."""

    def put(self, local: torch.Tensor, values: torch.Tensor) -> None:
        """Write them there."""


@dataclass(slots=True)
class _Origin:
    """How a view came about; `copied`: its local tensor does not alias the base's."""

    base: DTensor
    func: Op
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None  # which of several results
    copied: bool
    version: int | None
    local: LocalCopy | None = None  # where it copied its elements from, if it moved none


Snapshots = dict[int, torch.Tensor]  # by the id of the view
origins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of views that are alive
# Of those of a trace. A compiled function may keep them for good: calls with values do not ask here.
traced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


_watches: list[bool] = []  # is what is traced asked for all of its views?


@contextmanager
def all_views() -> Iterator[None]:
    """Within the block views of what is traced are remembered that share the memory of their base, too."""
    _watches.append(True)
    try:
        yield
    finally:
        _watches.pop()


def asks_of_trace() -> bool:
    """May an op on tensors of a trace be one on views that are remembered, or make one?"""
    return bool(traced.data or _watches)


def way_to(view: torch.Tensor) -> Iterator[_Origin]:
    """How it came about, and how its base did, as far as is remembered."""
    origin = _origin(view)
    while origin is not None:
        yield origin
        origin = _origin(origin.base)


def _origins(view: torch.Tensor) -> WeakTensorKeyDictionary:
    return traced if _is_traced(view) else origins


def _is_traced(x: torch.Tensor) -> bool:
    return isinstance(x, DTensor) and is_traced(x._local_tensor)


def _origin(view: torch.Tensor) -> _Origin | None:
    return _origins(view).get(view) if origins.data or traced.data else None


def remember(out: Any, func: Op, args: Args, kwargs: Kwargs, *, copied: bool) -> None:
    """Note that `out` is a view of `args[0]`."""
    base, *rest = args
    several = isinstance(out, list | tuple)
    for index, view in enumerate(out if several else (out,)):
        if isinstance(view, DTensor) and view is not base and _origin(view) is None:
            where = index if several else None
            _origins(view)[view] = _Origin(base, func, tuple(rest), kwargs, where, copied, _version_of(base))


def remember_local(
    out: DTensor, func: Op, args: Args, kwargs: Kwargs, index: int | None, local: LocalCopy
) -> None:
    """Note that `out` is a copy of elements of `args[0]` that this rank holds."""
    base, *rest = args
    _origins(out)[out] = _Origin(base, func, tuple(rest), kwargs, index, True, version_of(base), local)


def known_as(view: torch.Tensor, func: Op) -> None:
    """If it is remembered, then as what this op gives of its base alone."""
    origin = _origin(view)
    if origin is not None:
        origin.func, origin.args, origin.kwargs, origin.index = func, (), {}, None


def replace(known: DTensor, by: DTensor) -> None:
    """Remember of one object what was remembered of another."""
    if _origin(known) is not None:
        _origins(by)[by] = _origins(known).pop(known)


def stand_in(before: DTensor, x: DTensor) -> None:
    """`before` is what `x` was until its sizes change in place: a view where `x` was one, seen by its views.

    What is written into `x` counts as written into `before` too.
    """
    replace(x, before)
    vars(before)[_COUNTS_AS] = ref(x)
    for origin in list(_origins(x).values()):
        if origin.base is x:
            origin.base = before


_COUNTS_AS = "_writes_are_counted_by"


def _version_of(base: DTensor) -> int | None:
    """As torch counts, for what stands in for another tensor too."""
    counted = vars(base).get(_COUNTS_AS, lambda: None)()
    return version_of(base if counted is None else counted)


def is_copy(view: torch.Tensor) -> bool:
    """Does its local tensor not share the memory of what it is a view of?"""
    origin = _origin(view)
    return origin is not None and (origin.copied or is_copy(origin.base))


def around(route: Call, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """One op while such views are alive: stale ones are derived again first, written ones go back after."""
    for value in tree_leaves((args, dict(kwargs))):
        if isinstance(value, DTensor):
            refresh(value)
    written = written_by(func, args, kwargs) if func._schema.is_mutable else []
    before: Snapshots = {}
    for value in written:
        _say_write_back(value)
        _keep(value, before)
    out = route(func, args, kwargs)
    for value in written:
        _write_back(value, before)
    if written:
        return out
    if is_view(func) and (_origin(args[0]) is not None or (_watches and _is_traced(args[0]))):
        remember(out, func, args, kwargs, copied=False)
    return out


def refresh(view: DTensor) -> None:
    """Derive the view again if it had to copy and its base was written since."""
    origin = _origin(view)
    if origin is None:
        return
    refresh(origin.base)
    version = _version_of(origin.base)
    if not origin.copied or (version is not None and version == origin.version):
        return
    with torch.no_grad():  # below autograd, which is about to note the write that made the base another
        out = origin.func(origin.base, *origin.args, **origin.kwargs)
    fresh = out if origin.index is None else out[origin.index]
    local = view._local_tensor
    with torch.inference_mode() if local.is_inference() else nullcontext():  # it may be over by now
        local.copy_(fresh._local_tensor)
    origin.version = version


def written_by(func: Op, args: Args, kwargs: Kwargs) -> list[DTensor]:
    """The DTensors that the op writes, those in lists included."""
    found: list[DTensor] = []
    for place, name in written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        each = value if isinstance(value, list | tuple) else (value,)
        found += [x for x in each if isinstance(x, DTensor)]
    return found


@remembered(4096)
def written_places(func: Op) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that the op writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _say_write_back(view: torch.Tensor) -> None:
    """Refuse, or record, what a write into the view moves on its way to the base: before it is written."""
    origin = _origin(view)
    if origin is None or not isinstance(view, DTensor):
        return
    if origin.copied and origin.local is None:
        if overlaps(view._spec.layout):
            refuse(origin.func)
        why = "a view of a cut dim is written"
        announce(origin.func.name(), view, _finished(view._spec.layout, everywhere=True), why)
    _say_write_back(origin.base)


def _keep(view: torch.Tensor, before: Snapshots) -> None:
    """What copies with an element several times hold before a write: after it, one of them tells."""
    origin = _origin(view)
    if origin is None or not isinstance(view, DTensor):
        return
    if origin.local is not None and origin.local.overlaps:
        before[id(view)] = view._local_tensor.clone()
    _keep(origin.base, before)


def _write_back(view: torch.Tensor, before: Snapshots) -> None:
    """The base gets the values of a view that was written: each rank those that lie in its own part."""
    origin = _origin(view)
    if origin is None or not isinstance(view, DTensor):
        return
    if id(view) in before:
        _put_changed(view, origin, before[id(view)])
    elif origin.local is not None:
        origin.local.put(origin.base._local_tensor, view._local_tensor)
    elif origin.copied:
        _overlay(view, origin)
    _write_back(origin.base, before)
    if origin.local is not None and _version_of(origin.base) == origin.version:
        _derive_again(origin.base)


def _put_changed(view: DTensor, origin: _Origin, before: torch.Tensor) -> None:
    """Of an element that the view has several times, the base gets the one that was written."""
    local, values = origin.base._local_tensor, view._local_tensor
    if origin.local is None or not values.numel():
        return
    places = torch.arange(local.numel(), device=local.device).view(local.shape)
    changed = _bits(values).ne(_bits(before)).any(-1)
    values = carried_out(values)
    if local.is_conj():  # below dispatch `put_` sees memory alone
        local, values = local.conj(), values.conj_physical()
    if local.is_neg():
        local, values = neg_view(local), values.neg()
    local.put_(origin.local.take(places)[0].reshape(-1)[changed], values.reshape(-1)[changed])


def _bits(x: torch.Tensor) -> torch.Tensor:
    """A row of bytes per element: a NaN equals itself, and 0.0 does not equal -0.0."""
    flat = x.resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), -1)


def bases_of(view: DTensor) -> Iterator[DTensor]:
    """What a view that copied is of, and what that is of: a write into it is one into each."""
    return (origin.base for origin in way_to(view))


def _derive_again(written: DTensor) -> None:
    """The copies of a tensor that was written where torch does not count it, through `.data`.

    Only those that cost no communication: whether this rank copied is no other rank's business.
    """
    root = _root(written)
    for origin in list(_origins(written).values()):
        if origin.local is not None and _root(origin.base) is root:
            origin.version = -1


def _root(x: DTensor) -> DTensor:
    origin = _origin(x)
    return x if origin is None else _root(origin.base)


def _overlay(view: DTensor, origin: _Origin) -> None:
    base = origin.base
    whole = move_asked(view, _finished(view._spec.layout, everywhere=True), reason="write through a view")
    coords = base._spec.coords
    if coords is None:
        return
    values, touched = _blank(base), _blank(base)
    _seen(values, origin).copy_(whole)
    _mark(_seen(touched, origin), touched.dtype)
    mask = _finished(base._spec.layout).split(touched, coords) != 0
    base._local_tensor.copy_(torch.where(mask, base._spec.layout.split(values, coords), base._local_tensor))


def _mark(seen: torch.Tensor, of: torch.dtype) -> None:
    """Make no element zero: neither half of a complex number, nor one of those that a wider type takes."""
    parts = torch.view_as_real(seen) if seen.is_complex() and of.itemsize < seen.itemsize else seen
    if parts.itemsize > of.itemsize:
        parts.view(_OF_SIZE[parts.itemsize]).fill_(-1)  # all bits
    else:
        parts.fill_(1 + 1j if parts.is_complex() else 1)


_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _blank(base: DTensor) -> torch.Tensor:
    layout = base._spec.layout
    device = base._local_tensor.device
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device).zero_()


def _seen(plain: torch.Tensor, origin: _Origin) -> torch.Tensor:
    """What the view would see of a plain base: torch's own view."""
    out = origin.func(plain, *origin.args, **origin.kwargs)
    seen: torch.Tensor = out if origin.index is None else out[origin.index]
    return seen


def _finished(layout: Layout, *, everywhere: bool = False) -> Layout:
    """Pending axes replicated (every axis if `everywhere`)."""
    chosen = tuple(Replicate() if everywhere or p.is_pending else p for p in layout.placements)
    return layout.with_placements(chosen, order=layout.order_names)
