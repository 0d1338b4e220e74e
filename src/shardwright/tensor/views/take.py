"""Views of cut dims, and their gradients: local, whatever the placement.

A view that the rules would have to gather for goes here: the result gets the layout that describes where its
elements are (`views.through`), and each rank takes its local result out of its local tensor. The gradient of
such a view is put back where it came from: the layout of the base is what autograd's graph tells, and where
it tells nothing what the operands themselves suggest. Nothing depends on what was viewed before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat import TensorType, current_graph_task_id
from shardwright.errors import LayoutError, PlacementError
from shardwright.index.region import Shape
from shardwright.index.view import View, identity, reshaped
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Pending, Placement, Replicate
from shardwright.placement.interleaved import Interleaved
from shardwright.plan.decide import plan_redistribution
from shardwright.remember import remembered
from shardwright.rules.call import Args, Call, Kwargs, Op, TensorInfo
from shardwright.rules.catalog.view_maps import Chains, joined_views, on_elements, undone_by
from shardwright.rules.op import copies
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import here as mode
from shardwright.tensor.move import move_unasked
from shardwright.tensor.spec import LocalUse, Spec, coords_of, spec_of
from shardwright.tensor.views import base as graph_bases
from shardwright.tensor.views import write_back
from shardwright.tensor.views.elements import ElementView, PairView, pair_view, tears
from shardwright.tensor.wrap import common_use, wrap
from shardwright.views.end_to_end import end_to_end
from shardwright.views.local import ChainedView, LocalView, local_view
from shardwright.views.through import kept_dims, parts_of, through

Taken = LocalView | ChainedView | ElementView | PairView


@dataclass(frozen=True, slots=True)
class ViewCall:
    """A view that every rank takes of its local tensor, decided once for one layout."""

    results: tuple[Spec, ...]
    locals: tuple[Taken, ...]
    several: bool
    copies: bool

    def run(self, func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]) -> Any:
        """The results: aliases of the local tensor, or copies that remember where they came from."""
        source = tensors[0]._local_tensor
        if tensors[0].requires_grad:
            graph_bases.note(tensors[0], func)
        found = []
        for index, (spec, local) in enumerate(zip(self.results, self.locals, strict=True)):
            taken, copied = local.take(source)
            if self.copies and not copied:
                taken = taken.clone()
            out = wrap(taken, spec)
            if copied and not self.copies:
                where = index if self.several else None
                write_back.remember_local(out, func, args, kwargs, where, local)
            found.append(out)
        return found if self.several else found[0]


def cuts_through(view: View, layout: Layout) -> bool:
    """Does it take some indices of a dim that an axis cuts, which no local call of the same op can?"""
    if view.rows is None or view.nothing_changes:
        return False
    return any(kept_dims(part, view) is None for part in parts_of(layout, view))


def view_call(
    func: Op, call: Call, chains: Chains, layout: Layout, mesh: DeviceMesh, use: LocalUse | None
) -> ViewCall | None:
    """The views that a call is, for an operand of this layout; None where one tears elements."""
    specs: list[Spec] = []
    locals_: list[Taken] = []
    taken: Taken | None
    try:
        for views, info in zip(chains, call.results, strict=True):
            if info is None:
                return None
            target, local = _chained(layout, views, info, coords_of(mesh))
            taken = local
            if on_elements(func):
                taken = _on_elements(func, layout, views[0], target, coords_of(mesh))
            if taken is None:
                return None
            specs.append(spec_of(target, mesh, use))
            locals_.append(taken)
    except PlacementError:  # too many elements to list: the rules gather, and say so
        return None
    several = not isinstance(func._schema.returns[0].type, TensorType)
    return ViewCall(tuple(specs), tuple(locals_), several, copies(func))


def _chained(
    source: Layout, views: tuple[View, ...], info: TensorInfo, coords: tuple[int, ...] | None
) -> tuple[Layout, LocalView | ChainedView]:
    """The layout of what the last of the views sees, and what all of them are of the local tensor."""
    found = []
    for view in views:
        target = through(source, view, info.dtype, info.stride if view is views[-1] else None)
        if coords is not None:
            found.append(local_view(source, target, view, coords))
        source = target
    if coords is None:
        return source, LocalView((0,), None, None, overlaps=False)
    return source, found[0] if len(found) == 1 else ChainedView(tuple(found))


def _on_elements(
    func: Op, layout: Layout, view: View, target: Layout, coords: tuple[int, ...] | None
) -> Taken | None:
    """What a view that changes what an element is, is of a local tensor; None where a cut tears elements."""
    paired = len(view.target) < len(layout.shape)
    if paired and tears(layout):
        return None
    if coords is None:
        return LocalView((0,), None, None, overlaps=False)
    shape = target.local_shape(coords)
    if _in_order(layout, view):
        whole = local_view(layout, layout, identity(layout.shape), coords)
        return ElementView(func, whole, shape)
    if paired:
        return pair_view(layout, coords)
    seen = local_view(layout, target, view, coords)
    return ElementView(func, seen.without_last() if len(target.shape) > len(layout.shape) else seen, shape)


def _in_order(layout: Layout, view: View) -> bool:
    """Whether the local result has the elements of the local tensor in the same order."""
    parts = () if view.nothing_changes else parts_of(layout, view)
    return all(kept_dims(part, view) is not None for part in parts)


def anew(
    prepared: Prepared, func: Op, args: Args, kwargs: Kwargs, tensors: Sequence[DTensor]
) -> DTensor | None:
    """A reshape whose local strides do not merge although the logical ones do; None: not that.

    A local tensor that is a view itself (every other column of a cut) may lie otherwise than its logical
    tensor would. Its reshape is then a copy that remembers its base.
    """
    spec = prepared.results[0] if len(prepared.results) == 1 else None
    if prepared.moves or spec is None:
        return None
    return copied_reshape(spec, func, args, kwargs, tensors[0])


def copied_reshape(spec: Spec, func: Op, args: Args, kwargs: Kwargs, source: DTensor) -> DTensor | None:
    """A reshape to this spec, the elements of the local tensor in their order; None for other ops."""
    if func._schema.name not in _RESHAPES:
        return None
    coords = spec.coords
    if coords is None or "size" not in (a.name for a in func._schema.arguments):
        return None
    local = LocalView(spec.layout.local_shape(coords), None, None, overlaps=False)
    taken, copied = local.take(source._local_tensor)
    out = wrap(taken, spec)
    if copied and not copies(func):
        write_back.remember_local(out, func, args, kwargs, None, local)
    return out


_RESHAPES = frozenset({"aten::view", "aten::_unsafe_view"})


# ------------------------------------------------------------------------------------------ gradients


def put_back(
    func: Op, call: Call, tensors: Sequence[DTensor], mesh: DeviceMesh, given: Layout | None
) -> DTensor | None:
    """The result of an op that undoes views: gradients, `slice_scatter`, `cat`, `stack` of a split's parts.

    None where the base is not known, or the rules do as well. Where these move nothing (one rank has all of
    a part), the base is still better: the gradients of other parts of it lie as it does, and are added to
    this one. What moves there now is the part; afterwards it would be the whole.

    Args: given: what the rules give, if they move nothing.
    Cost: what brings an operand where the view of the base has it; nothing for an operand that is there.
    """
    info = call.results[0]
    if info is None or 0 in info.shape or (given is not None and graph_bases.base_layout() in {None, given}):
        return None
    view = undone_by(call)
    if view is not None and len(tensors) == 2:
        return _scattered(func, view, tensors[0], tensors[1], info.stride)
    views = [view] if view is not None else joined_views(call)
    if views is None or len(views) != len(tensors):
        return None
    use = common_use(tensors)
    # Parameters that compute locally are no gradients: the forward is recomputed, and decides as it did.
    backward = use is None and current_graph_task_id() != -1
    summed = func._schema.name == "aten::sum"
    base = None
    if use is None:
        stays = given is not None and (mode.explicit or any(x._spec.pending for x in tensors))
        base = _base_in_graph(views, tensors, info, exact=stays or summed)
    if base is None and given is None and not summed:
        base = _base_of(views, tensors, info.dtype, exact=view is None and not backward)
    if base is None:
        return None
    shaped = base.with_shape(info.shape, info.stride, dtype=info.dtype)
    return _embedded(func, spec_of(shaped, mesh, use), views, tensors)


def gives(call: Call, results: Sequence[Spec | None]) -> Callable[[], bool] | None:
    """Does `put_back` leave a call to the rules, which move nothing? Asked each time; None: never known."""
    info, spec = call.results[0], results[0]
    if info is None or spec is None or 0 in info.shape:
        return None
    return lambda: graph_bases.base_layout() in {None, spec.layout}


def _base_in_graph(
    views: Sequence[View], parts: Sequence[DTensor], made: TensorInfo, *, exact: bool
) -> Layout | None:
    """The layout of the base as autograd's graph tells it, for such a result.

    exact: only if no byte has to move.
    """
    base, shape = graph_bases.base_layout(), made.shape
    if base is None or base.mesh_shape != parts[0]._spec.layout.mesh_shape:
        return None
    if base.shape != shape:
        if shape[max(len(shape) - len(base.shape), 0) :] != base.shape or prod(shape) != base.numel:
            return None
        base = through(base, reshaped(base.shape, shape), base.dtype, None)  # dims of size 1 in front
    base = _with_pending(base, parts, made.dtype)
    if exact and any(_bytes_to(base, view, part) for view, part in zip(views, parts, strict=True)):
        return None
    return base


def _base_of(
    views: Sequence[View], parts: Sequence[DTensor], dtype: torch.dtype, *, exact: bool
) -> Layout | None:
    """The layout of a tensor of which these may be the views: of those that a part suggests, the nearest.

    exact: only one that has all parts where they are.
    """
    bases: dict[Layout, None] = {}
    for layout in dict.fromkeys(part._spec.layout for part in parts):
        cast = any(part.dtype != dtype for part in parts)
        bases.update(dict.fromkeys(_guesses(views, layout, cast=cast)))
    bases.update(dict.fromkeys(_laid_end_to_end(views, parts)))
    pairs = list(zip(views, parts, strict=True))
    if exact:  # nothing is planned: a part may have no way there
        there = (all(_is_there(_seen(base, *pair), pair[1]._spec.layout) for pair in pairs) for base in bases)
        return next((base for base, fits in zip(bases, there, strict=True) if fits), None)
    best: tuple[int, Layout] | None = None
    for base in bases:
        away = sum(_away(base, *pair) for pair in pairs)
        if not away:
            return base
        if best is None or away < best[0]:
            best = away, base
    return None if best is None else best[1]


def _laid_end_to_end(views: Sequence[View], parts: Sequence[DTensor]) -> Iterator[Layout]:
    """The whole whose elements are where those of the parts are, if these lie one after another in a dim."""
    shape = views[0].source
    if len(shape) == len(views[0].target):
        dim = next((at for at, size in enumerate(shape) if size != views[0].target[at]), None)
        base = None if dim is None else end_to_end(tuple(part._spec.layout for part in parts), dim)
        if base is not None and base.shape == shape:
            yield base


def _is_there(wanted: Layout, have: Layout) -> bool:
    """Does a part lie so already, or is it whole where the base cuts it?"""
    if wanted == have:
        return True
    axes = zip(wanted.placements, have.placements, strict=True)
    whole = all(one == other or (one.is_partition and other.is_replicated) for one, other in axes)
    return whole and not plan_redistribution(have, wanted).total_bytes


def _away(base: Layout, view: View, part: DTensor) -> int:
    """The bytes that bring a part where the view of the base has it; more than 0 unless it lies as that."""
    return 0 if _seen(base, view, part) == part._spec.layout else _bytes_to(base, view, part) or 1


def _bytes_to(base: Layout, view: View, part: DTensor) -> int:
    """The bytes that bring a part where the view of the base has it."""
    target = _seen(base, view, part)
    return 0 if target == part._spec.layout else plan_redistribution(part._spec.layout, target).total_bytes


def _guesses(views: Sequence[View], part: Layout, *, cast: bool) -> Iterator[Layout]:
    """Bases of which a part may be a view: as it is, or its dim cut in every part.

    What windows share is added up, which of the pending values only sums are for. Those of parts that are
    cast are finished before, as in any other op: terms of small integers wrap, those of halves are rounded.
    """
    shape = views[0].source
    windows = len(views[0].target) > len(shape)
    have = [
        Replicate() if (windows and _is_no_sum(p)) or (cast and p.is_pending) else p for p in part.placements
    ]
    for chunks in (None, len(views)):
        placements = []
        for placement, n in zip(have, part.sizes, strict=True):
            cut = placement.cut_dims(part.shape, n) if isinstance(placement, Partition) else ()
            one = len(cut) == 1 and cut[0] < len(shape)  # a window has a dim that its base has not
            changed = chunks is not None and one and shape[cut[0]] != part.shape[cut[0]]
            placements.append(Interleaved(cut[0], chunks) if changed and chunks else placement)
        with suppress(PlacementError, LayoutError):
            yield Layout(part.mesh_shape, placements, shape, dtype=part.dtype, order=part.order_names)


def _is_no_sum(placement: Placement) -> bool:
    return isinstance(placement, Pending) and not placement.linear


def _with_pending(base: Layout, parts: Sequence[DTensor], dtype: torch.dtype) -> Layout:
    """The base with sums that are still to be made where all parts, of its dtype, have them."""
    cast = any(part.dtype != dtype for part in parts)
    placements = []
    for axis, placement in enumerate(base.placements):
        have = {part._spec.layout.placements[axis] for part in parts}
        only = next(iter(have))
        pending = not cast and len(have) == 1 and isinstance(only, Pending) and only.linear
        if placement.is_partition:
            placements.append(placement)
        else:
            placements.append(only if pending else Replicate())
    return base.with_placements(tuple(placements), order=base.order_names)


def _seen(base: Layout, view: View, part: DTensor) -> Layout:
    return through(base, view, part._spec.layout.dtype, part._spec.layout.stride)


def _embedded(func: Op, spec: Spec, views: Sequence[View], parts: Sequence[DTensor]) -> DTensor:
    base, coords = spec.layout, spec.coords
    made: torch.Tensor | None = None
    for view, part in zip(views, parts, strict=True):
        values, target = _there(func, base, view, part)
        if coords is None:
            continue
        local = _local_view(base, target, view, coords)
        if made is None:
            made = local.embed(values.to(base.dtype), base.local_shape(coords))
        else:
            local.put(made, values)
    if made is None:
        made = parts[0]._local_tensor.new_empty((0,), dtype=base.dtype)
    return wrap(made, spec)


def _scattered(func: Op, view: View, base: DTensor, values: DTensor, stride: Shape) -> DTensor | None:
    """A copy of the base with the values where the view sees them; of an expanded one, each element alone."""
    layout = base._spec.layout
    if layout.pending_axes:
        return None
    coords = base._spec.coords
    moved, target = _there(func, layout, view, values)
    copied = layout.with_shape(layout.shape, stride)
    local = base._local_tensor.clone()
    if coords is not None:
        _local_view(layout, target, view, coords).put(local, moved)
    return wrap(local, spec_of(copied, base.device_mesh, base._spec.use))


def _there(func: Op, base: Layout, view: View, part: DTensor) -> tuple[torch.Tensor, Layout]:
    """The local values of a part where the view of the base has them, and that layout."""
    target = _seen(base, view, part)
    if part._spec.layout == target:
        return part._local_tensor, target
    return move_unasked(func.name(), part, target, "put where the base has it"), target


@remembered(8192)
def _local_view(base: Layout, target: Layout, view: View, coords: tuple[int, ...]) -> LocalView:
    return local_view(base, target, view, coords)
