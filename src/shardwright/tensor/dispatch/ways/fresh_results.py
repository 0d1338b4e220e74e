"""Steps in place of an op may end in a view of an operand, where the op itself gives a tensor of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwright.compat import is_composite, tree_map_only
from shardwright.rules.call import TensorInfo
from shardwright.tensor.dispatch.asked import Asked
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.plain.refuse import tensors_in
from shardwright.tensor.wrap import with_stride


def fresh(func: torch._ops.OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in place of the op: where the op makes new tensors, so does it.

    What torch composes of others (`reshape`, `contiguous`, ...) may be a view on one device too.
    """
    schema = func._schema
    composite = is_composite(func)
    if composite or schema.is_mutable or any(r.alias_info is not None for r in schema.returns):
        return function
    return partial(_of_its_own, function)


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


def _of_its_own(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = {_memory(x) for x in tensors_in((*args, *kwargs.values())) if isinstance(x, DTensor)}
    made = function(*args, **kwargs)
    return tree_map_only(DTensor, lambda x: x.clone() if _memory(x) in given else x, made)


def _memory(x: DTensor) -> int:
    return int(x._local_tensor.untyped_storage()._cdata)
