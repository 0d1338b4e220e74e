"""Lists, dicts and objects among the arguments: what a call changes in them is there for whoever gave them.

A call whose arguments have graphs gets others in their places, and so other lists. What it has put into those
is put into the lists that were given.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Self

import torch

from shardwright.compat import tree_flatten, tree_unflatten
from shardwright.erased.batches import fill, is_a_batch, object_of, state_of
from shardwright.erased.refuse import Refusal
from shardwright.errors import EraseError

CHANGED = Refusal("an argument", "the call changes what a list or dict among its arguments holds")
_CHANGEABLE = (list, dict, deque)
_DEEPEST = 8  # one that holds itself is none to be taken apart
_LEAVES = frozenset({torch.Tensor, int, float, bool, str, type(None), torch.dtype, torch.device})


@dataclass(frozen=True, slots=True)
class Structure:
    """How leaves lie in lists, dicts and objects. objects: those among the leaves of the tree, by place.

    keys: classes and signs of the keys of dicts: `1`, `1.0` and `True` are one key to a dict.
    shared: of lists, dicts and objects which stand there twice; none where none does.
    nodes: these themselves, by `id`, and no part of how they lie.
    """

    tree: Any
    keys: tuple[Any, ...]
    objects: tuple[tuple[int, _Object], ...]
    shared: tuple[int, ...] = ()
    nodes: tuple[int, ...] = field(default=(), compare=False)

    def put_together(self, leaves: Sequence[Any], before: Any = None) -> Any:
        """What has these leaves. before: with these objects in it where all leaves of one are the same."""
        if not self.objects:
            return tree_unflatten(leaves, self.tree)
        number = self.tree.num_leaves
        were = [None] * number if before is None else tree_flatten(before, is_leaf=is_whole)[0]
        remaining, of_place = iter(leaves), dict(self.objects)
        found = [
            of_place[place].made(remaining, were[place]) if place in of_place else next(remaining)
            for place in range(number)
        ]
        return tree_unflatten(found, self.tree)

    @property
    def count(self) -> int:
        """How many leaves there are."""
        return int(self.tree.num_leaves) + sum(each.structure.count - 1 for _, each in self.objects)


@dataclass(frozen=True, slots=True)
class _Object:
    """An object that holds a batch: its class, the names of its attributes, and how what they hold lies."""

    cls: type
    names: tuple[str, ...]
    structure: Structure

    def made(self, leaves: Iterator[Any], before: Any) -> Any:
        """It, of the next leaves; what was there before where these are its own."""
        mine = [*islice(leaves, self.structure.count)]
        state = None if before is None else (*(state_of(before) or {}).values(),)
        if state is not None and all(map(_is, mine, taken_apart(state)[0])):
            return before
        return object_of(
            self.cls, dict(zip(self.names, self.structure.put_together(mine, state), strict=True))
        )


@dataclass(frozen=True, slots=True)
class Containers:
    """got: what the call gets. pairs: each list in it, and the one that was given; none where it is that.

    leaves, structure: as they were before.
    """

    got: Any
    pairs: tuple[tuple[Any, Any], ...]
    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, given: Any, got: Any) -> Self:
        """Before the call."""
        leaves, structure = taken_apart(got)
        pairs = () if got is given else tuple(zip(nodes_of(got), nodes_of(given), strict=True))
        return cls(got, pairs, tuple(leaves), structure)

    def changed(self) -> bool:
        """Does any hold something else than before the call?"""
        leaves, structure = taken_apart(self.got)
        same = len(leaves) == len(self.leaves) and all(map(_is, leaves, self.leaves))
        return not same or structure != self.structure

    def hand_back(self, original: Callable[[Any], Any]) -> None:
        """Fill those that were given. original: what is theirs for what the call had, or has made."""
        of_given = {id(mine): theirs for mine, theirs in self.pairs}

        def back(x: Any) -> Any:  # a list, too, that the call has made and put there
            return (
                of_given[id(x)] if id(x) in of_given else with_leaves(x, [*map(original, taken_apart(x)[0])])
            )

        for mine, theirs in self.pairs:
            if mine is not theirs:
                _fill(theirs, mine, back)


def is_whole(x: Any) -> bool:
    """Would torch's flattening put it together as less than it was?

    A size (`x.shape`) as a plain tuple; an ordered dict, or a tuple with names, without its attributes.
    """
    may_have = isinstance(x, tuple) or type(x) is OrderedDict
    return isinstance(x, torch.Size) or (may_have and bool(getattr(x, "__dict__", None)))


def taken_apart(tree: Any) -> tuple[list[Any], Structure]:
    """Leaves and structure."""
    nodes: list[int] = []
    leaves, lies = _apart(tree, _DEEPEST, nodes)
    shared = tuple(map(nodes.index, nodes)) if len(set(nodes)) < len(nodes) else ()
    return leaves, Structure(*lies, shared, tuple(nodes))


def _apart(tree: Any, deep: int, nodes: list[int]) -> tuple[list[Any], tuple[Any, Any, Any]]:
    """Leaves, and what makes a `Structure`.

    Args: deep: how many objects may stand in one another. nodes: gets each list, dict and object.
    """
    keys: list[Any] = []

    def look(x: Any) -> bool:
        if isinstance(x, dict):
            keys.extend((type(key), repr(key) if isinstance(key, float) else "") for key in x)
        if isinstance(x, _CHANGEABLE):
            nodes.append(id(x))
        return is_whole(x)

    found, spec = tree_flatten(tree, is_leaf=look)
    leaves: list[Any] = []
    objects: list[tuple[int, _Object]] = []
    for place, x in enumerate(found):
        inside = _opened(x, deep, nodes)
        leaves += [x] if inside is None else inside[0]
        objects += [] if inside is None else [(place, inside[1])]
    return leaves, (spec, tuple(keys), tuple(objects))


def _opened(x: Any, deep: int, nodes: list[int]) -> tuple[list[Any], _Object] | None:
    """The leaves in an object that holds a batch; None of anything else."""
    if type(x) in _LEAVES or not deep or isinstance(x, torch.Tensor) or (state := state_of(x)) is None:
        return None
    inside = [id(x)]
    leaves, lies = _apart((*state.values(),), deep - 1, inside)
    if not is_a_batch(leaves):
        return None
    nodes += inside
    return leaves, _Object(type(x), tuple(state), Structure(*lies))


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """The same lists, dicts and objects of other leaves; the very ones where no leaf is another."""
    before, structure = taken_apart(tree)
    return tree if all(map(_is, leaves, before)) else structure.put_together(leaves, tree)


def held_among(structure: Any, held: Container[int]) -> tuple[tuple[int, int], ...]:
    """Which lists, dicts and objects of a tree are these very ones."""
    nodes = structure.nodes if isinstance(structure, Structure) else ()
    return tuple([(place, node) for place, node in enumerate(nodes) if node in held])


def nodes_of(tree: Any, deep: int = _DEEPEST) -> list[Any]:
    """Each container in it, and each leaf."""
    found: list[Any] = []

    def look(x: Any) -> bool:
        found.append(x)
        return is_whole(x)

    for x in tree_flatten(tree, is_leaf=look)[0]:
        if _opened(x, deep, []):
            found += nodes_of((*(state_of(x) or {}).values(),), deep - 1)[1:]
    return found


def _is(one: Any, other: Any) -> bool:
    return one is other


def _fill(theirs: Any, mine: Any, original: Callable[[Any], Any]) -> None:
    state = state_of(mine) if type(theirs) is type(mine) else None
    if state is not None:
        fill(theirs, {name: original(x) for name, x in state.items()})
    elif isinstance(theirs, list | deque):
        now = [original(x) for x in mine]
        theirs.clear()
        theirs.extend(now)
    elif isinstance(theirs, dict):
        entries = {key: original(x) for key, x in mine.items()}
        theirs.clear()
        theirs.update(entries)
    elif not isinstance(theirs, tuple) and _holds(theirs) != _holds(mine, original):
        raise EraseError(
            f"an erased function changes an argument of {type(theirs).__name__}, whose tensors have a graph\n"
            "  fix: call the function itself, or give it a list or dict"
        )


def _holds(x: Any, original: Callable[[Any], Any] = lambda x: x) -> list[int]:
    return [id(original(leaf)) for leaf in taken_apart(x)[0]]
