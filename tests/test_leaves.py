"""`compat.tree_leaves` finds what torch's does, in the same order."""

import collections

import pytest
import torch
from torch.utils import _pytree

from shardwright.compat import tree_leaves

Pair = collections.namedtuple("Pair", "one other")  # noqa: PYI024  as torch returns
x, y = torch.ones(2), torch.nn.Parameter(torch.ones(1))


class Own(dict):
    """A dict that torch does not know as one: a leaf."""


@pytest.mark.parametrize(
    "tree",
    [
        x, None, 1, (), [], {}, [[], ((), {})], (x, [1, (y, None)], {"b": x, "a": {"c": [True, "s"]}}),
        Pair(x, [y, 2]), collections.OrderedDict(b=x, a=(y,)), collections.deque([x, [y]]),
        collections.defaultdict(list, {"q": [x, 2]}), torch.Size([1, 2]),
        (torch.Size([2]), range(3), slice(1, 2)),
        torch.max(torch.ones(2, 2), 0), {"z": {1}}, [Own(a=x), y],
    ],
    ids=str,
)  # fmt: skip
def test_leaves_are_those_that_torch_finds_in_its_order(tree):
    found, expected = tree_leaves(tree), _pytree.tree_leaves(tree)
    assert len(found) == len(expected)
    assert all(
        a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b)
        for a, b in zip(found, expected, strict=True)
    )
