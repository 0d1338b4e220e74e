"""Lists, dicts and the like among the arguments: what a call changes in them is there for whoever gave them.

A call whose arguments have graphs gets others in their places, and so other lists. What it has put into those
is put into the lists that were given.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from shardwright.compat import tree_flatten, tree_unflatten
from shardwright.erased.refuse import Refusal
from shardwright.errors import EraseError

CHANGED = Refusal("an argument", "the call changes what a list or dict among its arguments holds")


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


def taken_apart(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure."""
    return tree_flatten(tree, is_leaf=is_whole)


def with_leaves(tree: Any, leaves: list[Any]) -> Any:
    """The same lists and dicts of other leaves; the very ones where no leaf is another."""
    before, structure = taken_apart(tree)
    return tree if all(map(_is, leaves, before)) else tree_unflatten(leaves, structure)


def nodes_of(tree: Any) -> list[Any]:
    """Each container in it, and each leaf."""
    found: list[Any] = []

    def look(x: Any) -> bool:
        found.append(x)
        return is_whole(x)

    tree_flatten(tree, is_leaf=look)
    return found


def _is(one: Any, other: Any) -> bool:
    return one is other


def _fill(theirs: Any, mine: Any, original: Callable[[Any], Any]) -> None:
    if isinstance(theirs, list | deque):
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
