"""Tensors of other stages: a shape without values, and the values that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import FakeTensor, FakeTensorMode, tree_leaves
from shardwright.parallel.pipeline.border import Leaf, in_memory
from shardwright.tensor.local_use import kept_spec
from shardwright.tensor.wrap import as_ours


class Call(NamedTuple):
    """The n-th call of a part in one forward of the model."""

    key: str
    number: int


class Value(NamedTuple):
    """One tensor of what a call returned: the leaf of this number."""

    call: Call
    leaf: int


_NOBODYS = frozenset([Value(Call("a tensor of another stage", -1), 0)])


class HollowMode(FakeTensorMode):
    """What runs ops on hollow tensors. Layers and losses, which need values, have none.

    They may come by one in ways that nobody sees: in an object, an attribute, a class that torch does not
    look into. An op on it is refused then; one that writes it into a tensor with values would do nothing.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._refuse: Callable[[frozenset[Value]], NoReturn] | None = None

    @contextmanager
    def refused(self, refuse: Callable[[frozenset[Value]], NoReturn]) -> Iterator[None]:
        """Inside of the block an op on hollow tensors is `refuse` of what they are made of."""
        outer, self._refuse = self._refuse, refuse
        try:
            yield
        finally:
            self._refuse = outer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._refuse is not None:
            values = frozenset().union(*map(origins, tree_leaves((args, kwargs))))
            if values:
                self._refuse(values)
        return super().__torch_dispatch__(func, types, args, kwargs)


def hollow(mode: FakeTensorMode, leaf: Leaf, device: torch.device) -> Tensor:
    """A tensor with a shape, and no values."""
    with mode:
        return in_memory(torch.empty(leaf.shape, dtype=leaf.dtype, device=device), leaf)


def hollow_if_distributed(mode: FakeTensorMode, x: Any) -> Any:
    """A hollow tensor in the place of a distributed one, for an op on hollow ones; any other value as it is.

    Of both, `spmd` would make a distributed tensor of hollow parts, which nobody knows to be without values.
    A parameter that computes as its local tensor does so here too.
    """
    if not isinstance(x, TorchDTensor):
        return x
    spec = as_ours(x)._spec
    inner = spec if spec.use is None else kept_spec(spec)
    if inner is None:
        return x
    made = hollow(mode, Leaf(tuple(inner.layout.shape), x.dtype), x.device)
    mark(made, frozenset())
    return made


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
