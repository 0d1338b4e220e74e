"""Steps in place of an op may end in a view of an operand, where the op itself gives a tensor of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwright.compat import is_composite, tree_map_only
from shardwright.remember import remembered
from shardwright.rules.call import TensorInfo
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.refuse import tensors_in
from shardwright.tensor.wrap import with_stride, wrap


def fresh(func: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in place of the op: where the op makes new tensors, so does it.

    What torch composes of others (`reshape`, `contiguous`, ...) may be a view on one device too.
    """
    return partial(of_its_own, function) if _makes_new(func) else function


@remembered(4096)
def _makes_new(func: torch._ops.OpOverload) -> bool:
    schema = func._schema
    returns_given = schema.is_mutable or any(made.alias_info is not None for made in schema.returns)
    return not (returns_given or is_composite(func))


def laid(asked: Asked, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in place of the op: its new results have the strides of the op's."""
    returns = asked.func._schema.returns
    infos = asked.infos
    if infos is None or len(infos) != len(returns):
        return function
    new = [None if made.alias_info is not None else info for made, info in zip(returns, infos, strict=True)]

    def run(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if isinstance(out, DTensor):
            return _laid(out, new[0])
        return tuple(map(_laid, out, new)) if isinstance(out, tuple) and len(out) == len(new) else out

    return run


def _laid(made: Any, info: TensorInfo | None) -> Any:
    return made if info is None or not isinstance(made, DTensor) else with_stride(made, info.stride)


def of_its_own(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function makes, in memory of its own, and as nobody's view.

    Nobody has the base of a view that was made on the way: autograd would take it for a leaf.
    """
    given = {_memory(x) for x in tensors_in((*args, *kwargs.values())) if isinstance(x, DTensor)}

    def new(x: DTensor) -> torch.Tensor:
        if _memory(x) in given:
            return x.clone()
        return wrap(x._local_tensor, x._spec) if x._is_view() else x

    return tree_map_only(DTensor, new, function(*args, **kwargs))


def _memory(x: DTensor) -> int:
    return int(x._local_tensor.untyped_storage()._cdata)
