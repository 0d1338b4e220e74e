"""Dispatch of one ATen op on DTensors: look up the prepared call, move what must move, run on locals, wrap.

Everything that can be decided from the op and the layouts is decided once, by the first of the ways that
answers (`ways.table`), and cached: the same call with the same layouts costs one look-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import CANNOT_VIEW, modes_on, sharding_of_users, tree_leaves, tree_map, tree_map_only
from shardwright.remember import memo, remembered
from shardwright.rules import registry
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_view, writes_elements
from shardwright.tensor import proxies
from shardwright.tensor.dispatch import (
    graph_sizes,
    memory_order,
    other_sizes,
    short,
    torch_shardings,
    written_memory,
)
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dispatch.run import (
    check_simple,
    is_simple,
    only_finishes,
    reads_finished,
    run,
    run_simple,
)
from shardwright.tensor.dispatch.ways import kept_form, local_reshape
from shardwright.tensor.dispatch.ways.local_reshape import RESHAPES, LocalReshape
from shardwright.tensor.dispatch.ways.plain_target import write_into_plain
from shardwright.tensor.dispatch.ways.steps import Steps
from shardwright.tensor.dispatch.ways.table import Handler, decide, handler_of, takes_symbols
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain import kept_shapes, made_gradients, own_terms
from shardwright.tensor.plain.replicated import distributed, replicate_plain
from shardwright.tensor.spec import Spec, has_form
from shardwright.tensor.views import offsets, take, write_back
from shardwright.tensor.wrap import as_ours

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
_CACHE_SIZE = 65536
# A spec: one local call on the operands as they are gives one tensor of this spec.
_cache: dict[tuple[Any, ...], Any] = memo("decided calls", {})
_modes = modes_on
_routes: dict[Op, Handler] = memo("routes of ops", {})


def dispatch(
    cls: type,  # noqa: ARG001 - of the tensor that was asked; the signature is torch's
    func: Op,
    types: Any,  # noqa: ARG001
    args: Args = (),
    kwargs: Kwargs = _NO_KWARGS,
) -> Any:
    """The value of `func` on the logical tensors, as DTensors: `DTensor.__torch_dispatch__`.

    Raises: RuleError: the op has no meaning on these layouts; what the single-device op raises.
    Cost: the redistributions that `trace()` shows; none when a rule takes the layouts as they are.
    """
    route = _routes.get(func)
    if route is None:
        route = _routes[func] = _whole_route_of(func)
    if torch.compiler.is_compiling():
        if graph_sizes.are_symbols(func, args, kwargs) and takes_symbols(func):
            route = _route_of_symbols(func)
        else:
            args, kwargs = graph_sizes.as_numbers(args, kwargs)
    copies = bool(write_back.origins.data)
    if _modes():
        route = partial(proxies.record, route)
        copies = copies or write_back.asks_of_trace()
    if copies:
        return write_back.around(route, func, args, kwargs)
    return route(func, args, kwargs)


@remembered(4096)
def _route_of_symbols(func: Op) -> Handler:
    decided = partial(graph_sizes.call, dispatch_call, _with_plain_tensors)
    return _whole_route_of(func, handler_of(func) or decided)


def _whole_route_of(func: Op, route: Handler | None = None) -> Handler:
    """The route of an op, and what stands around it for views and for ops that write.

    What is added here is judged by `short.learn` as well: known calls of the extension do not come by.
    """
    route = _route_of(func) if route is None else route
    name = func._schema.name
    if is_view(func) or name in offsets.OF_ALL_MEMORY:
        there = offsets.begins_there(func)
        if there is not None:
            route = partial(offsets.as_on_one_device, route, there)
    if name in memory_order.LAID_FIRST:
        route = partial(memory_order.as_described, route)
    if name in made_gradients.WATCHED:
        route = partial(made_gradients.awaited, route)
    if func in own_terms.SUMS:
        route = partial(own_terms.labelled, route)
    if func._schema.is_mutable:
        route = partial(kept_form.counting_writes, route)
    return partial(_where_it_may_write, route) if writes_elements(func) else route


def _route_of(func: Op) -> Handler:
    """The way of the op, or of each of its calls."""
    if sharding_of_users(func):
        torch_shardings.warn_of(func)
    return handler_of(func) or dispatch_call


def _where_it_may_write(route: Handler, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The op, unless one device refuses it for the memory that it would write, or its gradient has no way."""
    written_memory.refuse(func, args, kwargs)
    kept_shapes.refuse_graph(func, args, kwargs)
    return route(func, args, kwargs)


def dispatch_call(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The common path: what was decided for these layouts, or is now."""
    tensors: list[Any] = []
    key: list[Any] = [func]
    ours = _collect(args, tensors, key)
    for name in kwargs:
        key.append(name)
        ours = _collect((kwargs[name],), tensors, key) and ours
    if not ours:
        return _with_plain_tensors(func, args, kwargs, tensors)
    key.append(torch.get_default_dtype())  # what whole numbers become where they are divided
    frozen = tuple(key)
    known = _cache.get(frozen)
    if isinstance(known, Spec):
        return run_simple(known, func, args)
    if isinstance(known, Prepared) and known.checked:
        return _run_prepared(known, func, args, kwargs, tensors)
    if isinstance(known, LocalReshape):
        return known.run(func, args)
    if known is None:
        return _first(frozen, func, args, kwargs, tensors)
    return _again(known, frozen, func, args, kwargs, tensors)


def _first(key: tuple[Any, ...], func: Op, args: Args, kwargs: Kwargs, tensors: list[Any]) -> Any:
    """A call on layouts that were not seen before, as what is known of other sizes tells, or decided anew."""
    if sharding_of_users(func):
        torch_shardings.warn_of(func)
    if has_form(tensors):
        _store(key, _KEPT_FORM)
        if short.reader.there and (func not in own_terms.SUMS or own_terms.on_one_mesh(*args)):
            short.learn_on_forms(key, func, args)
        return _KEPT_FORM.run(func, args, kwargs, tensors)
    if func in RESHAPES and len(args) == 2 and not kwargs:
        reshape = local_reshape.adapt(func, args)
        if reshape is not None:
            _store(key, reshape)
            out = reshape.run(func, args)
            if short.reader.there:
                short.learn(key, func, args, kwargs, tensors, reshape, out)
            return out
    rules = registry.registry.generation
    known = other_sizes.adapt(func, key, args, kwargs, tensors) if func in other_sizes.ops else None
    if isinstance(known, Spec):
        out = run_simple(known, func, args)
        check_simple(known, func, out, tensors)
        _store(key, known)
        if short.reader.there:
            short.learn(key, func, args, kwargs, tensors, known, out)
        return out
    told: tuple[Args, Kwargs] = args, kwargs
    if torch.compiler.is_compiling():
        told = _told(args, kwargs, tensors)
    decided = decide(Asked(func, *told, tensors)) if known is None else known
    if registry.registry.generation != rules:  # a rule came meanwhile: it takes part
        return dispatch_call(func, args, kwargs)
    _store(key, decided)
    return _again(decided, key, func, args, kwargs, tensors)


def _told(args: Args, kwargs: Kwargs, tensors: list[Any]) -> tuple[Any, Any]:
    """The arguments that decide: a number that changes between calls of a graph stands for any number.

    For one of no sign beside pending values, whose largest may become the least.
    """
    any_number = math.nan if any(getattr(x._spec, "pending", False) for x in tensors) else 0.5
    told: tuple[Any, Any] = tree_map_only(torch.SymFloat, lambda _: any_number, (args, dict(kwargs)))
    return told


def _again(known: Any, key: tuple[Any, ...], func: Op, args: Args, kwargs: Kwargs, tensors: list[Any]) -> Any:
    """A call that was decided, in whatever way."""
    if isinstance(known, Steps):
        out = known.run(args, kwargs)
        if out is not NotImplemented:
            return tree_map_only(torch.Tensor, lambda x: distributed(x, tensors[0].device_mesh), out)
        known = decide(Asked(func, args, kwargs, tensors), by_other_ops=False)
        _store(key, known)
    if not isinstance(known, Prepared):
        return known.run(func, args, kwargs, tensors)
    first = not known.checked
    out = _run_prepared(known, func, args, kwargs, tensors)
    if first:
        _settle(known, out, key, func, args, kwargs, tensors)
    return out


def _settle(
    prepared: Prepared,
    out: Any,
    key: tuple[Any, ...],
    func: Op,
    args: Args,
    kwargs: Kwargs,
    tensors: list[Any],
) -> None:
    """Once a call has run: the short way to run it again, and what it tells of other sizes."""
    reshape = local_reshape.of_prepared(func, args, prepared, out)
    if reshape is not None:
        _store(key, reshape)
    elif prepared.call is None and not _is_reshape(func, args):
        prepared.simple = is_simple(prepared, out, len(tensors), args, kwargs)
        if prepared.simple and prepared.results[0] is not None:
            _store(key, prepared.results[0])
    if short.reader.there:
        short.learn(key, func, args, kwargs, tensors, reshape or prepared, out)
        if prepared.moves and only_finishes(prepared, tensors):
            short.learn_on_forms(key, func, args)
    other_sizes.remember(func, key, args, kwargs, prepared)


def _run_prepared(prepared: Prepared, func: Op, args: Args, kwargs: Kwargs, tensors: list[Any]) -> Any:
    """A call that the rules decided; what undoes views is put back where the base had it, if known."""
    for move in prepared.moves:
        memory = tensors[move.operand]._local_tensor.untyped_storage() if move.of_terms else None
        if hasattr(memory, "finished") and reads_finished(prepared, func, tensors, move):
            return dispatch_call(func, args, kwargs)
    if prepared.call is not None:
        result = None if prepared.moves else prepared.results[0]
        given = None if result is None else result.layout
        found = take.put_back(func, prepared.call, tensors, tensors[0].device_mesh, given)
        if found is not None:
            return found
    try:
        out = run(prepared, func, args, kwargs, tensors)
    except CANNOT_VIEW:
        again = take.anew(prepared, func, args, kwargs, tensors)
        if again is None:
            raise
        return again
    if prepared.moves and is_view(func):
        write_back.remember(out, func, args, kwargs, copied=True)
    return out


def _is_reshape(func: Op, args: Args) -> bool:
    """A view with sizes: whether the local tensor can be viewed so depends on its own strides, each time."""
    return is_view(func) and any(isinstance(value, list | tuple) for value in args)


def _collect(values: Iterable[Any], tensors: list[Any], key: list[Any]) -> bool:
    """Append the tensors and what identifies each value; `1`, `1.0` and `True` must not look alike.

    Returns: whether every tensor is a DTensor of ours.
    """
    ours = True
    for value in values:
        cls = value.__class__
        if cls in _SCALARS:
            key.append(cls)
            key.append(value)
        elif isinstance(value, DTensor):
            tensors.append(value)
            key.append(value._spec.token)
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
            ours = False  # a plain tensor, or torch's own DTensor
        elif isinstance(value, list | tuple):
            key.append(len(value))
            ours = _collect(value, tensors, key) and ours
        elif cls is torch.SymFloat or cls is torch.SymBool:
            key.append(object())  # to compare it with what is known would be a part of the graph
        else:
            key.append(cls)
            if value is not None:
                key.append(value if cls.__hash__ is not None else id(value))
    return ours


_SCALARS = frozenset({bool, int, float, str, torch.dtype})


def _store(key: tuple[Any, ...], prepared: Any) -> None:
    if len(_cache) >= _CACHE_SIZE:
        _cache.clear()
        short.recipes.clear()  # a call that is decided, and has no recipe, gets none any more
        short.on_forms.clear()
    _cache[key] = prepared


def _with_plain_tensors(func: Op, args: Args, kwargs: Kwargs, tensors: list[Any]) -> Any:
    """torch's DTensors become ours, plain tensors replicated ones where that is allowed; then once more."""
    ours = next(t for t in tensors if isinstance(t, TorchDTensor))
    mesh = ours.device_mesh
    schema = func._schema

    def convert(value: Any, written: bool) -> Any:
        def one(each: Any) -> Any:
            if isinstance(each, TorchDTensor):
                return as_ours(each)
            is_read = isinstance(each, torch.Tensor) and not written
            return replicate_plain(each, mesh, func) if is_read else each

        return tree_map(one, value)

    writes = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
    names = [a.name for a in schema.arguments]
    new_args = tuple(convert(v, writes[n]) for n, v in zip(names, args, strict=False))
    new_kwargs = {name: convert(value, writes.get(name, False)) for name, value in kwargs.items()}
    if _writes_plain(new_args, new_kwargs):
        return write_into_plain(func, new_args, new_kwargs)
    return dispatch(DTensor, func, (), new_args, new_kwargs)


_KEPT_FORM = kept_form.KeptForm(dispatch_call)


def _writes_plain(args: Args, kwargs: Kwargs) -> bool:
    """Is a plain tensor left? Then the op writes into it: everything else was converted."""
    leaves = tree_leaves((args, dict(kwargs)))
    return any(isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for v in leaves)
