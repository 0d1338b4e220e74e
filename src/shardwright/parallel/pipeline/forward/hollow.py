"""Tensors of other stages: a shape without values, and the values that it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shardwright.compat import FakeTensor, FakeTensorMode

if TYPE_CHECKING:
    from shardwright.parallel.pipeline.border import Leaf


class Call(NamedTuple):
    """The n-th call of a part in one forward of the model."""

    key: str
    number: int


class Value(NamedTuple):
    """One tensor of what a call returned: the leaf of this number."""

    call: Call
    leaf: int


_NOBODYS = frozenset([Value(Call("a tensor of another stage", -1), 0)])


def hollow(mode: FakeTensorMode, leaf: Leaf, device: torch.device) -> Tensor:
    """A tensor with a shape, and no values."""
    with mode:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)


def is_hollow(x: Any) -> bool:
    """Is it a tensor without values?"""
    return isinstance(x, FakeTensor)


def mark(x: Tensor, values: frozenset[Value]) -> None:
    """Note of which values of earlier stages a hollow tensor is made."""
    x.made_of = values  # type: ignore[attr-defined]


def made_of_more(x: Any, values: frozenset[Value]) -> None:
    """Note that these values are in a tensor too, if it is hollow."""
    if isinstance(x, FakeTensor):
        mark(x, getattr(x, "made_of", frozenset()) | values)


def origins(x: Any) -> frozenset[Value]:
    """The values of earlier stages that a hollow tensor is made of; none of any other."""
    if not isinstance(x, FakeTensor):
        return frozenset()
    found: frozenset[Value] = getattr(x, "made_of", _NOBODYS)
    return found
