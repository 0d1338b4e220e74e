"""Functions of torch that are, on local tensors, what their ops are on these: learned call by call.

`torch.add(x, y)` on DTensors goes through torch's dispatcher to one op, whose known call is that op on the
local tensors. Then `torch.add(x_local, y_local)` has the same result, and the way through the dispatcher (2.4
us) can be left out; a function that is several ops (`F.rms_norm` is six) spares six such ways and five
wrappers. The extension runs such a call as a whole where nothing stands between function and op: no gradient,
mode, transform, cast, trace or profile.

What makes it provable: the ops that the function ran on the DTensors are heard, each has a recipe
(`short.Short`), and on tensors without data the function runs the very local calls of these recipes, on the
same operands, in the same order, and gives the same of their results.

Not here: views of an operand. What a view knows of its base is written by torch between function and op.
Those that a function makes on its way (`F.linear` of three dims) are nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from shardwright.compat import tree_leaves
from shardwright.errors import ImplicitRedistributionError
from shardwright.remember import memo
from shardwright.rules import registry
from shardwright.rules.call import Args, Kwargs
from shardwright.rules.op import is_view
from shardwright.tensor.dispatch import any_number, call, derived, one_node, short
from shardwright.tensor.dispatch.bindings import Heard, Listening
from shardwright.tensor.dispatch.same_local_calls import does_the_same, place_of
from shardwright.tensor.dispatch.ways.list_arguments import Taken
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.explicit_mode import explicit
from shardwright.tensor.plain import boundary
from shardwright.tensor.plain.host_reads import READING

_Key = tuple[Any, ...]
# Of calls by their keys; False: it goes the way through torch. Bounded by `_keep`.
# None, here as well: one for each choice of numbers.
whole: dict[_Key, short.Short | bool | None] = memo("calls of whole functions", {})
# None: one for each choice of numbers, under the key with these at its end.
whole_lists: dict[_Key, short.ShortList | bool | None] = memo("calls of whole functions on lists", {})
# May a call of the function be whole? None of the user's functions is kept.
# None: it is in C and makes views, so that no plain tensor is made on its way.
functions: dict[Any, bool | None] = memo("functions that may be whole", {})
# How many calls there were of which nothing was known, and that differ in numbers alone.
_met: dict[_Key, int] = memo("calls that may be whole, as met", {})
# How many calls of a function were found not to be whole.
_in_vain: dict[Any, int] = memo("functions that were not whole", {})
_MANY, _FEW, _TOO_MANY = 16384, 16, 64
# Functions of torch that take lists of tensors, as optimizers do, and beside them their counts of steps.
OF_LISTS = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith(("_foreach_", "_fused_")))
_IN_C = BuiltinFunctionType | MethodDescriptorType | MethodWrapperType | WrapperDescriptorType
_HOMES = frozenset({"torch.functional", "torch.nn.functional"})
_DETACH = torch.ops.aten.detach.default
_REFLECTED = frozenset(
    getattr(torch.Tensor, f"__r{name}__") for name in ("sub", "div", "truediv", "floordiv", "pow", "mod")
)
_OTHERS = frozenset({"__getitem__", "__setitem__", "__get__", "__set__"})  # views, and no ops at all


def meet(func: Any) -> bool:
    """May a call of this function be whole? Only one of torch's own, that is not done in a way of ours."""
    of_torch = isinstance(func, _IN_C)
    module = getattr(func, "__module__", None) or ""
    ours = func in one_node.WHOLE
    may = of_torch or func in _REFLECTED or module in _HOMES or ours
    if func in boundary.OWN or func in READING or func in boundary.AUTOGRAD:
        may = False
    may = may and getattr(func, "__name__", "") not in _OTHERS
    if of_torch or ours or module.partition(".")[0] == "torch":
        if len(functions) >= _MANY:
            functions.clear()
        functions[func] = may
    return may


def first(way: Callable[..., Any], func: Any, types: Any, args: Args, kwargs: dict[str, Any] | None) -> Any:
    """Run a call of which nothing is known; met again, learn whether it may be run as a whole from now on.

    Args: way: what runs it: the boundary of the operands' class.
    """
    on_lists = func in OF_LISTS and bool(args) and isinstance(args[0], list | tuple)
    key, numbers = _key_of_lists(func, args, kwargs or {}) if on_lists else _key_of(func, args, kwargs or {})
    if not _is_worth_learning(key, has_numbers=bool(numbers) and not on_lists):
        return way(torch.Tensor, func, types, args, kwargs)
    rules = registry.registry.generation
    with Listening() as listening:
        out = way(torch.Tensor, func, types, args, kwargs)
    if registry.registry.generation == rules:
        if on_lists:
            _learn_list(func, args, kwargs or {}, key, numbers, listening.asked, out)
        elif one_node.is_wanted(func, args):
            _learn_node(way, (func, types, args, kwargs or {}), key, listening.asked, out)
        elif listening.too_many:
            _keep_call(key, False)
        else:
            _learn(func, args, kwargs or {}, key, listening.asked, out)
    return out


def _key_of(func: Any, args: Args, kwargs: Kwargs) -> tuple[_Key, _Key]:
    """The key of a call, as the extension makes it, and the numbers in it."""
    key: list[Any] = [func]
    call._collect(args, [], key)
    for name, value in kwargs.items():
        key.append(name)
        call._collect((value,), [], key)
    return tuple(key), tuple(part for part in key if part.__class__ in {int, float, complex})


def _key_of_lists(func: Any, args: Args, kwargs: Kwargs) -> tuple[_Key, _Key]:
    taken = Taken((func,), args, kwargs)
    return tuple(taken.key), tuple(taken.numbers)


def _is_worth_learning(key: _Key, *, has_numbers: bool) -> bool:
    """Was there such a call before, but for its numbers? Learning costs more than calls that come once.

    Nor were there many: another number each time is not learned.
    """
    alike = tuple(part for part in key if part.__class__ not in {int, float, complex})
    if len(_met) >= _MANY:
        _met.clear()
    met = _met[alike] = _met.get(alike, 0) + 1
    if has_numbers and met > _TOO_MANY:
        if key[0] in any_number.functions:
            _keep(whole, any_number.split(key)[0], False)
        else:
            functions[key[0]] = False
    return met > 1 and not (has_numbers and met > _FEW)


def _keep(table: dict[_Key, Any], key: _Key, found: Any) -> None:
    _bound(table)
    table[key] = found


def _keep_call(key: _Key, found: short.Short | bool, *, holds_for_all: bool = False) -> None:
    if key[0] not in any_number.functions:
        _keep(whole, key, found)
    else:
        _bound(whole)
        any_number.put(whole, key, found, holds_for_all=holds_for_all)


def _bound(table: dict[_Key, Any]) -> None:
    if len(table) >= _MANY:
        table.clear()


def _learn(func: Any, args: Args, kwargs: Kwargs, key: _Key, heard: list[Heard], out: Any) -> None:
    if all(is_view(each.op) for each in heard):  # or no op at all
        functions[func] = None if heard and isinstance(func, _IN_C) else False
        return
    # by a keyword, which torch obeys after the op; what is written may have wanted it before
    is_asked_for = isinstance(out, DTensor) and out.requires_grad and not any(out is x for x in args)
    found = None if is_asked_for else _found(func, args, kwargs, heard, out)
    if found is None and _never(func):
        functions[func] = False
    hands_on = found is not None and len(heard) == 1 and _hands_numbers_on(func, key, heard[0])
    if hands_on:
        any_number.functions.add(func)
    _keep_call(key, found or False, holds_for_all=hands_on)


def _learn_node(
    way: Callable[..., Any], given: tuple[Any, ...], key: _Key, heard: list[Heard], out: Any
) -> None:
    """Keep what runs such calls as one node.

    Args: given: function, types, arguments of the call that gave `out`, and ran what was heard; nothing, if
        that was too much.
    """
    func, types, args, kwargs = given
    forms, again = one_node.on_forms(args), out
    if forms is not args:  # what is finished first was heard: not what runs where that is known
        heard, again = _heard_on(way, (func, types, forms, kwargs)) if forms is not None else ([], None)
    of_results = [each for each in heard if each.op is not _DETACH]  # by which a graph keeps results
    found = _found(func, forms, kwargs, of_results, again) if forms is not None and of_results else None
    spec = found.results[0] if found is not None and again._spec.layout == out._spec.layout else None
    _keep(one_node.calls, key, False if spec is None else one_node.node_of(func, args, kwargs, spec))


def _heard_on(way: Callable[..., Any], given: tuple[Any, ...]) -> tuple[list[Heard], Any]:
    """What a call runs without gradients, and gives; nothing where it would send."""
    try:
        with torch.no_grad(), explicit(), Listening() as listening:
            out = way(torch.Tensor, *given)
    except ImplicitRedistributionError:
        return [], None
    return listening.asked, out


def _hands_numbers_on(func: Any, key: _Key, heard: Heard) -> bool:
    """Is a function in C the op of its name, which gets the numbers that it got, and has a recipe for any?

    Then it does the same with other numbers. A function in Python, or several ops, may look at them.
    """
    if isinstance(func, FunctionType) or heard.op._op not in any_number.ops:
        return False
    name, op = func.__name__.strip("_"), heard.op._schema.name.partition("::")[2].strip("_")
    below, numbers = any_number.split(_key_of(heard.op._op, heard.args, heard.kwargs)[0])
    known = short.recipes.get(below) is not None
    return known and name in {op, f"i{op}", f"true{op}", f"itrue{op}"} and any_number.split(key)[1] == numbers


def _never(func: Any) -> bool:
    """Was no call of this function found to be whole, out of several? Then none is looked at again."""
    _in_vain[func] = _in_vain.get(func, 0) + 1
    return _in_vain[func] > _FEW and not any(found for key, found in whole.items() if key[0] is func)


def _found(func: Any, args: Args, kwargs: Kwargs, heard: list[Heard], out: Any) -> short.Short | None:
    """The recipe of a call that ran these ops and gave `out`; None: it is not to be run as a whole."""
    recipes = [_recipe_of(each, in_backwards=func in one_node.WHOLE) for each in heard]
    last = recipes[-1] if recipes else None
    operands = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    if last is None or None in recipes or not isinstance(out, DTensor) or not _are_plain(operands):
        return None
    if last.written is None:
        place = place_of(out, heard[-1].returned)
        if place is None or last.begins is not None or any(out is x for x in operands):
            return None
    else:
        place = 0
        if len(heard) > 1 or out is not _tensors(heard[0])[last.written] or out is not operands[last.written]:
            return None
    if not does_the_same(func, args, kwargs, heard, recipes, operands, place):
        return None
    return short.Short(func, (last.results[place],), False, last.written, (), False, None)


def _recipe_of(each: Heard, *, in_backwards: bool) -> short.Short | None:
    """The recipe of an op that holds wherever the function is called."""
    found = short.recipe_of(each.op, _key_of(each.op, each.args, each.kwargs)[0][1:])
    if found is None or found.holds is None:
        return found
    return found if in_backwards and found.holds is derived.in_a_backward else None


def _tensors(each: Heard) -> list[Any]:
    return [x for x in tree_leaves((each.args, each.kwargs)) if isinstance(x, torch.Tensor)]


def _are_plain(operands: list[Any]) -> bool:
    """Are all of them DTensors whose local tensors are of torch's own class?"""
    return all(isinstance(x, DTensor) and type(x._local_tensor) is torch.Tensor for x in operands)


def _learn_list(
    func: Any, args: Args, kwargs: Kwargs, key: _Key, numbers: _Key, heard: list[Heard], out: Any
) -> None:
    """One op on the very lists, by the name of the function, that has a recipe."""
    found: short.ShortList | None = None
    by_numbers = False
    op = heard[0].op if len(heard) == 1 else None
    if op is not None and op._schema.name == f"aten::{func.__name__}" and _are_one_element(args, kwargs):
        taken = Taken((op._op,), heard[0].args, heard[0].kwargs)
        helpers = (True,) if taken.plain else ()
        of_all = (*taken.key, *helpers)
        by_numbers = of_all in short.lists and short.lists[of_all] is None
        found = short.lists.get((*of_all, *taken.numbers) if by_numbers else of_all)
        writes_it = out is None or out is args[0]
        if found is None or not _same_members(args, kwargs, heard[0]) or writes_it != (found.results is None):
            found = None
    if by_numbers:
        _keep(whole_lists, key, None)
        key = (*key, *numbers)
    _keep(whole_lists, key, False if found is None else found._replace(call=func))


def _are_one_element(args: Args, kwargs: Kwargs) -> bool:
    """Have plain tensors beside lists one element? Others are let through by some blocks only."""
    leaves = [x for x in tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    return all(
        type(x._local_tensor) is torch.Tensor if isinstance(x, DTensor) else x.numel() == 1 for x in leaves
    )


def _same_members(args: Args, kwargs: Kwargs, heard: Heard) -> bool:
    """Did the op get the tensors that the function got, in this order?"""
    mine, theirs = (
        [x for x in tree_leaves(given) if isinstance(x, DTensor)]
        for given in ((args, dict(kwargs)), (heard.args, heard.kwargs))
    )
    return len(mine) == len(theirs) and all(x is y for x, y in zip(mine, theirs, strict=True))
