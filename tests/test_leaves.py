"""`compat.tree_leaves` finds what torch's does, in the same order; `tree_map` makes what torch's makes."""

import collections
import dataclasses
from functools import partial

import pytest
import torch
from torch.utils import _pytree

from shardwright.compat import tree_leaves, tree_map, tree_map_only

Pair = collections.namedtuple("Pair", "one other")  # noqa: PYI024  as torch returns
x, y = torch.ones(2), torch.nn.Parameter(torch.ones(1))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a map makes of a leaf."""

    of: object


def described(leaf: object) -> object:
    return ("made", id(leaf.of)) if isinstance(leaf, Leaf) else (type(leaf), id(leaf))


class Own(dict):
    """A dict that torch does not know as one: a leaf."""


TREES = [
        x, None, 1, (), [], {}, [[], ((), {})], (x, [1, (y, None)], {"b": x, "a": {"c": [True, "s"]}}),
        Pair(x, [y, 2]), collections.OrderedDict(b=x, a=(y,)), collections.deque([x, [y]]),
        collections.defaultdict(list, {"q": [x, 2]}), torch.Size([1, 2]),
        (torch.Size([2]), range(3), slice(1, 2)),
        torch.max(torch.ones(2, 2), 0), {"z": {1}}, [Own(a=x), y],
    ]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_leaves_are_those_that_torch_finds_in_its_order(tree):
    found, expected = tree_leaves(tree), _pytree.tree_leaves(tree)
    assert len(found) == len(expected)
    assert all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("kinds", [None, torch.Tensor, (int, str)], ids=str)
def test_maps_are_those_of_torch_and_call_in_its_order(tree, kinds):
    def mapped(every, only):
        seen = []
        call = partial(every) if kinds is None else partial(only, kinds)
        return call(lambda leaf: seen.append(id(leaf)) or Leaf(leaf), tree), seen

    (made, seen), (other, expected) = (
        mapped(tree_map, tree_map_only), mapped(_pytree.tree_map, _pytree.tree_map_only)
    )  # fmt: skip
    assert seen == expected
    assert _pytree.tree_structure(made) == _pytree.tree_structure(other)
    assert list(map(described, tree_leaves(made))) == list(map(described, _pytree.tree_leaves(other)))
