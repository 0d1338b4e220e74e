"""What the call of a part returned, beside what it returned when the borders were learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.compat import tree_flatten, tree_leaves, tree_map
from shardwright.errors import ParallelError
from shardwright.parallel.pipeline.border import Leaf
from shardwright.parallel.pipeline.forward.hollow import Call

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def values_in(tree: Any) -> list[Any]:
    """What of a result can cross a border: its tensors and its floats, which data decides."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) or type(leaf) is float]


def number_of(value: float) -> Tensor:
    """A float as it travels."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def described(call: Call, tree: Any) -> Any:
    """What a call returned, tensors and floats as `Leaf`. Raises: ParallelError: what cannot be sent."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return Leaf.of(leaf)
        if type(leaf) is float:
            return Leaf((), torch.float64, number=leaf)
        if not isinstance(leaf, _PLAIN):
            raise ParallelError(
                f"{call.key} returns a {type(leaf).__name__}, and what a stage hands to the next is tensors "
                "(in tuples, lists, dicts) and plain values\n  fix: cut around a module that returns those; "
                "for a cache of keys and values, pass use_cache=False"
            )
        return leaf

    return tree_map(one, tree)


def refuse_attributes(call: Call, leaf: Any) -> None:
    """Raise ParallelError for a tensor with attributes of the user's: what is sent is its values."""
    own = sorted(vars(leaf)) if type(leaf) is Tensor else []
    if own:
        raise ParallelError(
            f"pipeline: {call.key} returns a tensor with an attribute of its own, {own[0]!r}, which does not "
            f"cross a border\n  fix: return it from {call.key} beside the tensor"
        )


def check_returned(call: Call, known: Any, tree: Any) -> None:
    """Raise ParallelError where a result is not what later stages take it for."""
    if known is None:
        raise ParallelError(another_branch(f"call {call.number + 1} of {call.key}"))
    (have, structure), (want, learned) = tree_flatten(tree), tree_flatten(known)
    if len(have) != len(want) or structure != learned:
        raise ParallelError(_changed(call, "another structure"))
    for x, leaf in zip(have, want, strict=True):
        if isinstance(leaf, Leaf) and leaf.number is None:
            shape = tuple(x.shape) if isinstance(x, Tensor) else None
            if shape != leaf.shape:
                what = f"shape {shape}" if shape is not None else repr(x)
                raise ParallelError(_changed(call, f"{what} instead of shape {leaf.shape}"))
        elif isinstance(leaf, Leaf):
            if type(x) is not float:
                raise ParallelError(_changed(call, f"{x!r} instead of a float"))
        elif type(x) is not type(leaf) or x != leaf:
            raise ParallelError(_changed(call, f"{x!r} instead of {leaf!r}"))


def _changed(call: Call, what: str) -> str:
    return (
        f"pipeline: {call.key} returns {what}: later stages go on from what it returned when the borders "
        "were learned, at the first step of these shapes\n  fix: return it as a tensor (of one shape for all "
        "micro-batches) or a float, which cross a border with their values"
    )


def another_branch(what: str) -> str:
    """The text of the error for a forward that goes another way than it went."""
    return (
        f"pipeline: {what} is computed with a tensor of another stage that was not asked for when the "
        "borders were learned, at the first step of these shapes: the forward took another branch since\n"
        "  fix: let no value of a tensor or an attribute decide what the layers are given, or decide it by "
        "an argument that is no tensor"
    )
