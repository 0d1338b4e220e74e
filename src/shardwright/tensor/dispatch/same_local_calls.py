"""Does a function of torch do on local tensors what its ops' recipes do? Tensors without data tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwright.compat import DisableTorchFunctionSubclass, tree_leaves, tree_map_only
from shardwright.rules.call import Args, Kwargs
from shardwright.tensor.dispatch.bindings import Heard, Listening, without_data
from shardwright.tensor.dtensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwright.tensor.dispatch import short


def place_of(out: Any, returned: Any) -> int | None:
    """Which of the results of an op this is."""
    each = returned if isinstance(returned, list | tuple) else (returned,)
    return next((i for i, one in enumerate(each) if one is out), None)


def does_the_same(
    func: Any,
    args: Args,
    kwargs: Kwargs,
    heard: list[Heard],
    recipes: list[Any],
    operands: list[Any],
    place: int,
) -> bool:
    """Does the function run, on tensors without data, the local calls of the recipes, and give the last's?"""
    pairs = _Pairs(operands)
    stood = list(pairs.all())
    empty_args, empty_kwargs = tree_map_only(torch.Tensor, pairs.of, (tuple(args), dict(kwargs)))
    try:
        with DisableTorchFunctionSubclass(), Listening() as listening:
            returned = func(*empty_args, **empty_kwargs)
    except Exception:  # noqa: BLE001 - whatever it is: the call goes the way through torch then
        return False
    if len(listening.asked) != len(heard):
        return False
    for ours, recipe, theirs in zip(heard, recipes, listening.asked, strict=True):
        if not _is_local_call(ours, recipe, theirs, pairs) or not pairs.learn(ours.returned, theirs.returned):
            return False
    if place_of(returned, listening.asked[-1].returned) != place:
        return False
    if recipes[-1].written is not None:
        return True
    memory = {x.untyped_storage()._cdata for x in stood}
    written = (x for each in listening.asked for x in _written(each))  # a look-up with `max_norm`
    return all(x.untyped_storage()._cdata not in memory for x in (returned, *written))


def _written(each: Heard) -> list[torch.Tensor]:
    """What an op writes."""
    named = dict(zip((of.name for of in each.op._schema.arguments), each.args, strict=False)) | each.kwargs
    names = [of.name for of in each.op._schema.arguments if of.alias_info and of.alias_info.is_write]
    return [x for x in tree_leaves([named.get(name) for name in names]) if isinstance(x, torch.Tensor)]


def _is_local_call(ours: Heard, recipe: short.Short, theirs: Heard, pairs: _Pairs) -> bool:
    """Is what the function did on its own what the recipe does for the op?"""
    if recipe.call is not theirs.op._op or ours.op is not theirs.op:
        return False
    given = list(ours.args)
    for place, value in recipe.overrides:
        given[place] = value
    mine, others = (
        tree_leaves((list(a), dict(k))) for a, k in ((given, ours.kwargs), (theirs.args, theirs.kwargs))
    )
    return (
        len(mine) == len(others)
        and ours.kwargs.keys() == theirs.kwargs.keys()
        and all(_stands_for(x, y, pairs) for x, y in zip(mine, others, strict=True))
    )


def _stands_for(x: Any, y: Any, pairs: _Pairs) -> bool:
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return pairs.of(x) is y
    return type(x) is type(y) and bool(x == y)


class _Pairs:
    """Which tensor without data stands for which DTensor."""

    def __init__(self, operands: list[Any]) -> None:
        self._stands: dict[int, tuple[Any, torch.Tensor]] = {}
        for x in operands:
            self._stands.setdefault(id(x), (x, without_data(x._local_tensor)))

    def of(self, x: Any) -> torch.Tensor | None:
        found = self._stands.get(id(x))
        return None if found is None else found[1]

    def all(self) -> Iterator[torch.Tensor]:
        return (stand_in for _, stand_in in self._stands.values())

    def learn(self, ours: Any, theirs: Any) -> bool:
        """The results of one op; those that were operands must stand for the same."""
        one, other = tree_leaves(ours), tree_leaves(theirs)
        if len(one) != len(other):
            return False
        for x, y in zip(one, other, strict=True):
            if isinstance(x, DTensor) != isinstance(y, torch.Tensor):
                return False
            if isinstance(x, DTensor) and self._stands.setdefault(id(x), (x, y))[1] is not y:
                return False
        return True
