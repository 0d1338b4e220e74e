"""Recipes of known calls: those that are one call on the local tensors as they are, and what it gives.

Python decides, and writes down what it decided; the extension (`extension/known_call.c`) follows. So there is
one place that says which calls can go the short way, and none in C. A recipe is found by the key of its call,
and holds for every call with this key, but for what C asks each time:

* no mode sees the op, and no view that had to copy is alive;
* a view: inference mode is off, and the local strides merge where they must;
* a write: nothing that is read lies in the memory that is written.

Where the answer is another one, Python runs the call, as it does without the extension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwright.comm.record import recording
from shardwright.compat import tree_map_only
from shardwright.layout.layout import Layout
from shardwright.placement.partial import Partial
from shardwright.remember import memo
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.rules.op import is_pointwise, writes_elements
from shardwright.tensor.dispatch import any_number, bindings, derived, memory_order, written_memory
from shardwright.tensor.dispatch.prepared import Prepared
from shardwright.tensor.dispatch.ways.local_reshape import LocalReshape
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain import made_gradients
from shardwright.tensor.spec import Spec
from shardwright.tensor.views import offsets, take


class Short(NamedTuple):
    """What C does for one key; it reads the fields by their place.

    call:      what is called on the local tensors.
    results:   the specs of new tensors; None for a result that is no tensor.
    several:   the results are in a list or a tuple.
    written:   which operand the call writes and gives back; None: it gives new tensors.
    overrides: places of arguments that the local call has otherwise, and what it has there.
    placed:    where the results begin in memory follows from where the first operand does, as for views.
    begins:    where they begin on one device if the operand begins at 0; None: where it does.
    binding:   the same as `call`, in less time, but seen by modes of functions; None: there is none.
    holds:     asked at each call; where it says False, Python runs it. None: the recipe always holds.
    """

    call: Callable[..., Any]
    results: tuple[Spec | None, ...]
    several: bool
    written: int | None
    overrides: tuple[tuple[int, Any], ...]
    placed: bool
    begins: tuple[int, ...] | None
    binding: Callable[..., Any] | None = None
    holds: Callable[[], bool] | None = None


# Bounded by who fills it: each of these calls is also one of those that `call._store` keeps.
# None: one for each choice of numbers, under the key with these at its end.
recipes: dict[tuple[Any, ...], Short | None] = memo("recipes of known calls", {})
# Keys of calls on pending values that may have been finished: what is read is exchanged, and no more.
on_forms: set[tuple[Any, ...]] = memo("known calls on finished forms", set())


class ShortList(NamedTuple):
    """What C does for one key of a call on lists of tensors; it reads the fields by their place.

    call:     what is called on the lists of local tensors.
    results:  the specs of new tensors, None for one that is no DTensor; None: the op gives nothing.
    writes:   which operands are written, from one up to another.
    no_views: none of the operands may be a view: one device refuses some of its writes.
    versions: autograd is told what was written.
    dense:    the kernel trusts that all of them are contiguous.
    """

    call: Callable[..., Any]
    results: tuple[Spec | None, ...] | None
    writes: tuple[tuple[int, int], ...]
    no_views: bool
    versions: bool
    dense: bool


# Bounded by who fills it: `lists` clears it with what it decided.
# None: one for each choice of numbers, under the key with these at its end.
lists: dict[tuple[Any, ...], ShortList | None] = memo("recipes of known calls on lists", {})
list_ops: set[Any] = memo("ops of known calls on lists", set())


class _Reader:
    """Is there somebody who follows recipes? Without the extension none is written."""

    there = False


reader = _Reader()


def learn(
    key: tuple[Any, ...],
    func: Op,
    args: Args,
    kwargs: Kwargs,
    tensors: Sequence[DTensor],
    known: Spec | LocalReshape | Prepared,
    out: Any,
) -> None:
    """Write down how a call was run that just gave `out`, if it can be run so by its key alone.

    Args: key: of `call.dispatch_call`. known: how it was run: all that surrounds it is judged here.
    """
    if isinstance(known, Prepared):
        found = _of_prepared(known, func, args, tensors, out)
    elif isinstance(known, Spec):
        found = Short(func._op, (known,), False, None, (), False, None)
    else:
        found = Short(func._op, (known.spec,), False, None, ((1, known.size),), False, None)
    if found is None or _something_around(func, args) or by_default_dtype(tensors, found.results):
        return
    if offsets.begins_there(func) is not None:
        found = found._replace(placed=True, begins=offsets.from_the_start(func, args, kwargs))
    if found.call is func._op:
        found = found._replace(binding=_binding(func, found, args, kwargs))
    found_by = func._op, *key[1:-1]  # an overload hashes in Python, what it calls does not
    if any_number.only_computes(func):
        any_number.ops.add(func._op)
        holds_for_all = isinstance(known, Spec) or getattr(known, "any_size", None) is not None
        any_number.put(recipes, found_by, found, holds_for_all=holds_for_all)
    else:
        recipes[found_by] = found


def learn_on_forms(key: tuple[Any, ...], func: Op, args: Args) -> None:
    """Write down that a call, which only reads, is the same call on what was finished before."""
    if func._schema.is_mutable or offsets.begins_there(func) is not None or _something_around(func, args):
        return
    found_by = func._op, *key[1:-1]
    if any_number.only_computes(func):
        any_number.ops.add(func._op)
        found_by, _ = any_number.split(found_by)
    on_forms.add(found_by)


def by_default_dtype(tensors: Iterable[DTensor], results: Iterable[Spec | None]) -> bool:
    """May the dtype of a result be torch's default one, which C does not ask for?"""
    made = [spec.layout.dtype for spec in results if spec is not None]
    return any(map(_is_fraction, made)) and not any(_is_fraction(x._spec.layout.dtype) for x in tensors)


def _is_fraction(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def recipe_of(op: Op, key: Sequence[Any]) -> Short | None:
    """The recipe of a call of the op, if there is one. Args: key: of its arguments."""
    found_by = op._op, *key
    found: Short | None = (
        any_number.find(recipes, found_by) if op._op in any_number.ops else recipes.get(found_by)
    )
    return found


def _binding(func: Op, found: Short, args: Args, kwargs: Kwargs) -> Callable[..., Any] | None:
    """What may be called in place of the overload on such local arguments."""
    local_args, local_kwargs = tree_map_only(DTensor, lambda x: x._local_tensor, (list(args), dict(kwargs)))
    for place, value in found.overrides:
        local_args[place] = value
    return bindings.binding_of(func, local_args, local_kwargs)


def learn_list(func: Op, key: Sequence[Any], numbers: Sequence[Any] | None, found: ShortList) -> None:
    """Write down how a call on lists was run that goes the short way.

    Args: key: what identifies the arguments. numbers: for which it holds only; None: for all.
    """
    if _something_around(func, ()):
        return
    list_ops.add(func._op)
    of_all = func._op, *key
    if numbers is None:
        lists[of_all] = found
    else:
        lists[of_all], lists[*of_all, *numbers] = None, found


def _of_prepared(
    prepared: Prepared, func: Op, args: Args, tensors: Sequence[DTensor], out: Any
) -> Short | None:
    """The local call that was prepared; None where more belongs to it."""
    if not prepared.checked or prepared.skip or prepared.gather_all:
        return None
    if prepared.brought_back or prepared.outs or (prepared.derived and prepared.derived.writes_out):
        return None
    call: Callable[..., Any] | None = prepared.local or func._op
    holds: Callable[[], bool] | None = None
    if prepared.call:
        holds = take.gives(prepared.call, prepared.results)
        call = None if holds is None or prepared.moves else call
    elif prepared.moves:
        call, holds = _on_terms(prepared, func, args, tensors), lambda: not recording()
    elif prepared.derived:
        holds = derived.in_a_backward
    if call is None:
        return None
    overrides = _by_place(prepared, func, len(args))
    written = prepared.written
    if overrides is None or (prepared.mutated and not _writes_one(prepared, tensors)):
        return None
    results, several = prepared.results, type(out) in {list, tuple}
    if len(results) != (len(out) if several else 1) or not (several or isinstance(out, DTensor)):
        return None
    target = written[0] if prepared.mutated else None
    return Short(call, results, several, target, overrides, False, None, None, holds)


def _on_terms(
    prepared: Prepared, func: Op, args: Args, tensors: Sequence[DTensor]
) -> Callable[..., Any] | None:
    """What an op by element calls where all that moves are finished operands that become terms of a sum.

    One rank has such an operand as it is; for the others it is zero, and not written out. None: other moves.
    """
    places = [i for i, value in enumerate(args) if isinstance(value, DTensor)]
    lying = {(x._spec.layout.shape, x._spec.layout.stride) for x in tensors}
    if prepared.local or not is_pointwise(func) or len(places) != len(tensors) or len(lying) != 1:
        return None
    zeros = [places[m.operand] for m in prepared.moves if not _is_own_term(tensors[m.operand], m.target)]
    becomes = {_becomes(tensors[m.operand]._spec.layout, m.target) for m in prepared.moves}
    if becomes != {True}:
        return None
    return partial(_with_zeros, func._op, zeros) if zeros else func._op


def _becomes(layout: Layout, target: Layout) -> bool:
    """Do axes on which a tensor is whole make a sum of it, and the others nothing?"""
    pairs = zip(layout.placements, target.placements, strict=True)
    terms = all(old == new or (old.is_replicated and new == Partial("sum")) for old, new in pairs)
    return terms and layout.is_ordered_as(target)


def _is_own_term(x: DTensor, target: Layout) -> bool:
    """Is it this rank that has the only term that is not zero?"""
    places = zip(x._spec.layout.placements, target.placements, x._spec.coords or (), strict=True)
    return all(old == new or coord == 0 for old, new, coord in places)


def _with_zeros(op: Callable[..., Any], zeros: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    given = list(args)
    for place in zeros:
        given[place] = args[place].new_zeros(()).expand(args[place].shape)
    return op(*given, **kwargs)


def _by_place(prepared: Prepared, func: Op, given: int) -> tuple[tuple[int, Any], ...] | None:
    """What is overridden, by its place among the arguments that were given so; None where one was not."""
    places = {argument.name: place for place, argument in enumerate(func._schema.arguments)}
    found = tuple([(places[name], value) for name, value in prepared.overrides])
    return found if all(place < given for place, _ in found) else None


def _writes_one(prepared: Prepared, tensors: Sequence[DTensor]) -> bool:
    """Does the call write one operand, which is its result, and was memory no question?"""
    if len(prepared.mutated) != 1 or prepared.written != prepared.mutated:
        return False
    target = tensors[prepared.mutated[0]]
    return not any(
        written_memory.share_memory(target, x) for i, x in enumerate(tensors) if i != prepared.mutated[0]
    )


def _something_around(func: Op, args: Args) -> bool:
    """Does more stand around the op (`call._whole_route_of`) than what C asks at each call?"""
    if func._schema.is_mutable and not writes_elements(func):
        return True
    name = func._schema.name
    if name in memory_order.LAID_FIRST:
        return True
    return name in made_gradients.WATCHED and made_gradients.passes_over(func, args)
