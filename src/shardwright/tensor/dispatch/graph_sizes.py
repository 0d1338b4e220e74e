"""Calls on tensors whose sizes are symbols of a graph: one graph for all sizes, where sizes decide nothing.

A call is decided for the sizes of the example. What the decision says of other sizes (`rules.any_size`,
`views.any_size`) then gives the sizes of the results as symbols, and what it asks of sizes (that two are
equal, that ranks divide one) is asked of symbols: torch guards the answer. What is decided by sizes asks for
numbers, and the graph holds for these alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import nan, prod
from typing import Any, cast

import torch

from shardwright.compat import CANNOT_VIEW, current_graph_task_id, is_composite, tree_leaves, tree_map_only
from shardwright.compat.dynamo import trace_again_with_numbers
from shardwright.compat.symbols import at, has_symbols, hint, hints
from shardwright.layout.layout import Layout
from shardwright.layout.text import plain_cut
from shardwright.placement.base import Pending
from shardwright.rules.any_size import AnySize
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.registry import registry
from shardwright.tensor.dispatch import other_sizes
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dispatch.run import local_call, move_operands_of, wrap_results
from shardwright.tensor.dispatch.ways.algorithm import ByAlgorithm
from shardwright.tensor.dispatch.ways.local_reshape import RESHAPES
from shardwright.tensor.dispatch.ways.steps import Steps
from shardwright.tensor.dispatch.ways.table import decide
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.graph_spec import GraphSpec, of_sizes
from shardwright.tensor.plain.replicated import distributed
from shardwright.tensor.spec import Spec, spec_of
from shardwright.tensor.wrap import wrap
from shardwright.views.any_size import reshape_form

_EXPAND = torch.ops.aten.expand.default

Route = Callable[[Op, Args, Kwargs], Any]


def are_symbols(func: Op, args: Args, kwargs: Kwargs) -> bool:
    """Has a DTensor among the arguments sizes that are symbols, or is a gradient repeated so often?"""
    given = tree_leaves((args, kwargs))
    return any(isinstance(x, DTensor) and isinstance(x._spec, GraphSpec) for x in given) or (
        func is _EXPAND and current_graph_task_id() != -1 and has_symbols(given)
    )


def as_numbers(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with numbers for symbols, for which alone the graph holds."""
    given = tree_leaves((args, dict(kwargs)))
    trace_again_with_numbers([x for x in given if isinstance(x, torch.SymInt)])
    for x in given:
        if isinstance(x, DTensor) and isinstance(x._spec, GraphSpec):
            x._spec.fix()
    numbers: tuple[Args, Kwargs] = tree_map_only(torch.SymInt, int, (args, dict(kwargs)))
    return numbers


def call(otherwise: Route, beside_plain: Callable[..., Any], func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The call for sizes that are symbols.

    otherwise: how it runs where numbers are asked for. beside_plain: how it does beside plain tensors.
    """
    tensors = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    if not all(isinstance(x, DTensor) for x in tensors):
        return beside_plain(func, args, kwargs, tensors)
    out = _of_any_size(func, args, kwargs, cast("list[DTensor]", tensors))
    return otherwise(func, *as_numbers(args, kwargs)) if out is NotImplemented else out


def _of_any_size(func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor]) -> Any:
    if any(map(_holds_none_of_a_symbol, tensors)):  # for other sizes it may hold some
        return NotImplemented
    if func is _EXPAND and current_graph_task_id() != -1:
        return _repeated(tensors[0], args[1])
    asked = _asked(func, args, kwargs, tensors, [x._spec.shown for x in tensors], hint)
    decided = decide(asked)
    if isinstance(decided, Steps | ByAlgorithm):
        return _by_other_ops(func, args, kwargs, tensors, decided)
    if not isinstance(decided, Prepared) or decided.skip or decided.gather_all or decided.brought_back:
        return NotImplemented
    if decided.moves and any(isinstance(x._spec, GraphSpec) and x._spec.repeats for x in tensors):
        return NotImplemented
    if func in RESHAPES and not kwargs and not decided.moves:
        return _reshaped(func, args, tensors[0], decided)
    form = decided.any_size
    local = asked.decision.local
    if form is None and not (decided.overrides or decided.call):
        of_others = registry.is_changed and not all(rule.any_size for rule in registry.rules_of(func))
        form = None if of_others else asked.decision.same_way()
    # What is equal is asked before other sizes are tried: symbols that must be equal become one.
    if form is None or decided.call or not _fits(form, _named(func, args, kwargs), tensors):
        return NotImplemented
    if local is not None and not dict(local.labels).keys() <= dict(form.held).keys():
        return NotImplemented
    tried = partial(_is_chosen_at, func, args, kwargs, tensors, decided, form)
    if not (form is decided.any_size or _holds(tried, (args, dict(kwargs)), tensors)):
        return NotImplemented
    if local is not None and asked.coords is not None:
        sizes = {name: tensors[operand].shape[dim] for name, (operand, dim) in form.held}
        decided = replace(decided, local=local.of_symbols(func, asked.coords, sizes))
    return _run(func, args, kwargs, tensors, decided, form)


def _holds_none_of_a_symbol(x: DTensor) -> bool:
    sizes = zip(x.shape, x._local_tensor.shape, strict=False)  # who is outside has a part of one dim
    return x._spec.coords is None or any(part == 0 and type(whole) is not int for whole, part in sizes)


def _by_other_ops(
    func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor], decided: Steps | ByAlgorithm
) -> Any:
    """The ops that give its value, each for sizes that are symbols, where other sizes are run by the same."""
    if isinstance(decided, Steps):
        if not is_composite(func):
            return NotImplemented
        made = decided.run(args, kwargs)
        return tree_map_only(torch.Tensor, lambda x: distributed(x, tensors[0].device_mesh), made)
    if decided.chosen.algorithm.rows is not None or any(x._spec.pending for x in tensors):
        return NotImplemented
    chosen_at = partial(_is_chosen_at, func, args, kwargs, tensors, decided)
    holds = _holds(chosen_at, (args, dict(kwargs)), tensors)
    return decided.run(func, args, kwargs, tensors) if holds else NotImplemented


def _asked(
    func: Op,
    args: Args,
    kwargs: Kwargs,
    tensors: list[DTensor],
    specs: Sequence[Spec],
    number: Callable[[Any], int],
) -> Asked:
    """The call on tensors of these specs, with numbers for symbols."""
    left = iter([wrap(x._local_tensor, spec) for x, spec in zip(tensors, specs, strict=True)])
    given = tree_map_only(DTensor, lambda _: next(left), (args, dict(kwargs)))
    any_number = nan if any(spec.pending for spec in specs) else 0.5  # as `call` tells it
    given = tree_map_only(torch.SymFloat, lambda _: any_number, given)
    given_args, given_kwargs = tree_map_only(torch.SymInt, number, given)
    examples = [x for x in tree_leaves((given_args, given_kwargs)) if isinstance(x, DTensor)]
    return Asked(func, given_args, given_kwargs, examples)


def _numbers(ranks: int) -> tuple[Callable[[str], int], ...]:
    """For symbols, by their names: all few, all many, and each another one, all divided by the ranks."""
    return (
        lambda _: 2 * ranks,
        lambda _: ranks << 16,
        lambda name: ranks * (1009 + 2 * int("0" + "".join(filter(str.isdigit, name)))),
    )


def _at(x: DTensor, number: Callable[[str], int]) -> Spec:
    return x._spec.at(number) if isinstance(x._spec, GraphSpec) else x._spec


def _holds(chosen_at: Callable[..., bool], arguments: tuple[Args, Kwargs], tensors: list[DTensor]) -> bool:
    """Do the smallest and the largest sizes, and such of which no two agree, choose the same way?

    A way costs so much more for each element: what is cheapest for both ends is for all that lies between.
    So ranks whose graphs were made for other examples send the same. Where the ends choose another way, those
    of the sizes that choose this one are asked of the one symbol.
    """
    ranks = tensors[0].device_mesh.size()
    if all(chosen_at(number=number) for number in _numbers(ranks)):
        return True
    sizes, given = (
        [size for size in tree_leaves(asked) if isinstance(size, torch.SymInt)]
        for asked in ([tuple(x.shape) for x in tensors], arguments)
    )
    named = {str(symbol) for size in sizes + given for symbol in size.node.expr.free_symbols}
    alone = [size for size in sizes if size.node.expr.is_symbol]
    return len(named) == 1 and bool(alone) and _is_between(chosen_at, alone[0], ranks)


def _is_between(chosen_at: Callable[..., bool], size: torch.SymInt, ranks: int) -> bool:
    """Ask the symbol for the range around the example in which the same way is chosen."""
    example = hint(size)

    def steps(step: int, limit: int) -> int:
        return _most(lambda far: chosen_at(number=lambda _: example + step * far), limit)

    low = example - ranks * steps(-ranks, max(0, example // ranks - 2))
    high = example + ranks * steps(ranks, 1 << 16)
    return low < high and bool(size >= low) and bool(size <= high)


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """The most steps, up to a limit, for which it holds: for 0 it does, and once it does not, never again."""
    if holds(limit):
        return limit
    inside, outside = 0, limit
    while outside - inside > 1:
        middle = (inside + outside) // 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return inside


def _is_chosen_at(
    func: Op,
    args: Args,
    kwargs: Kwargs,
    tensors: list[DTensor],
    decided: Prepared | ByAlgorithm,
    form: AnySize | None = None,
    *,
    number: Callable[[str], int],
) -> bool:
    """Is the same way chosen where each symbol is the number that its name is given?"""
    specs = [_at(x, number) for x in tensors]
    try:
        other = decide(_asked(func, args, kwargs, tensors, specs, partial(at, number=number)))
    except (RuntimeError, IndexError, ValueError):  # there is no call of such sizes
        return False
    if not isinstance(other, type(decided)) or _way(other) != _way(decided):
        return False
    if form is None or isinstance(other, ByAlgorithm):
        return True
    shapes = [spec.layout.shape for spec in specs]
    pairs = zip(form.results, other.results, strict=True)
    return all(not (made and spec) or made.shape(shapes) == spec.layout.shape for made, spec in pairs)


def _named(func: Op, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)


def _fits(form: AnySize, named: dict[str, Any], tensors: list[DTensor]) -> bool:
    return form.fits([tuple(x.shape) for x in tensors], [named[name] for name, _ in form.arguments])


def _way(decided: Prepared | ByAlgorithm) -> tuple[Any, ...]:
    if isinstance(decided, ByAlgorithm):
        return (decided.chosen.algorithm,)
    moves = [(move.operand, move.target.placements) for move in decided.moves]
    results = [spec and spec.layout.placements for spec in decided.results]
    return decided.reason, moves, results


def _run(
    func: Op, args: Args, kwargs: Kwargs, tensors: list[DTensor], decided: Prepared, form: AnySize
) -> Any:
    shapes: Any = [tuple(x.shape) for x in tensors]
    places, named = {name for name, _ in form.arguments}, _named(func, args, kwargs)
    followed = places | (other_sizes.computed_with(func) if all(map(_takes_numbers, tensors)) else set())
    if any(_has_symbols(value) for name, value in named.items() if name not in followed):
        return NotImplemented
    results = tuple(_result(decided, form, place, shapes) for place in range(len(decided.results)))
    prepared = replace(decided, results=results)
    locals_ = [x._local_tensor for x in tensors]
    if decided.moves:
        move_operands_of(prepared, func, args, kwargs, tensors, locals_)
    local_args, local_kwargs = local_call(prepared, func, args, kwargs, locals_)
    return wrap_results(prepared, (decided.local or func)(*local_args, **local_kwargs), tensors)


def _takes_numbers(x: DTensor) -> bool:
    """Whatever their sign: a largest value may become the least."""
    return all(p.linear for p in x._spec.shown.layout.placements if isinstance(p, Pending))


def _has_symbols(value: Any) -> bool:
    return any(isinstance(part, torch.SymInt | torch.SymFloat) for part in tree_leaves(value))


def _result(decided: Prepared, form: AnySize, place: int, shapes: Sequence[Any]) -> Spec | None:
    spec, made = decided.results[place], form.results[place]
    return None if spec is None or made is None else of_sizes(spec, made.shape(shapes))


def _repeated(x: DTensor, sizes: Sequence[Any]) -> Any:
    """The gradient of a sum. It does not say that it repeats elements: such layouts are of no kind.

    With numbers it moves each element once: where ranks would send it, they are asked for.
    """
    layout, new = x._spec.shown.layout, len(sizes) - x.dim()
    cuts = [plain_cut(p) for p in layout.placements if not p.is_replicated]
    grown = [dim for dim, size in enumerate(x.shape) if type(size) is int and size == 1]
    if any(cut is None or cut in grown or new for cut in cuts) or -1 in sizes:
        return NotImplemented
    parts = enumerate(x._local_tensor.shape)
    held = [*sizes[:new], *[sizes[new + dim] if dim in grown else size for dim, size in parts]]
    shown = Layout(
        layout.mesh_shape, layout.placements, hints(sizes), dtype=layout.dtype, order=layout.order_names
    )
    spec = of_sizes(spec_of(shown, x._spec.mesh, x._spec.use), sizes)
    if isinstance(spec, GraphSpec):
        spec.__dict__["repeats"] = bool(cuts)
    return wrap(x._local_tensor.expand(held), spec)


def _reshaped(func: Op, args: Args, x: DTensor, decided: Prepared) -> Any:
    """Blocks of dims are found for numbers of which no two agree by chance."""
    target, size = decided.results[0], args[1]
    number = _numbers(x.device_mesh.size())[-1]
    if target is None or not (_holds_as_many(x, size, number) or _is_made_to(x, size, target, number)):
        return NotImplemented
    apart = _at(x, number)
    other = decide(_asked(func, args, {}, [x], [apart], partial(at, number=number)))
    if not isinstance(other, Prepared) or _way(other)[1:] != _way(decided)[1:]:
        return NotImplemented
    form = None if other.results[0] is None else reshape_form(apart.layout, other.results[0].layout)
    sizes = None if form is None else form.target_shape(tuple(x.shape), size)
    if form is None or sizes is None or decided.local or decided.call:
        return NotImplemented
    try:
        local = func(x._local_tensor, form.local_sizes(x._local_tensor.shape, sizes))
    except CANNOT_VIEW:
        return NotImplemented
    return wrap(local, of_sizes(target, sizes))


def _holds_as_many(x: DTensor, size: Sequence[Any], number: Callable[[str], int]) -> bool:
    have, want = prod(_at(x, number).layout.shape), prod(at(n, number) for n in size)
    return have == want if want >= 0 else have % want == 0  # one of them may be -1


def _is_made_to(x: DTensor, size: Sequence[Any], target: Spec, number: Callable[[str], int]) -> bool:
    """Ask what is equal for the example, so that symbols become one: of sizes that are not the tensor's own.

    Those are numbers among the arguments, and the sizes with which an input was viewed outside of the graph.
    """
    form = reshape_form(x._spec.shown.layout, target.layout)
    asked = form is not None and form.target_shape(tuple(x.shape), size) is not None
    return asked and _holds_as_many(x, size, number)
