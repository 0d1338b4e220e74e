"""Ops that tell the host something: numbers, and whether tensors are equal or the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwright.errors import RuleError
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.move import whole_unasked
from shardwright.tensor.wrap import offset_of

aten = torch.ops.aten


def item(func: Op, args: Args, kwargs: Kwargs) -> Any:
    """`.item()` and friends read the finished logical value, never the local part.

    Raises: RuleError: on a rank outside the mesh.
    """
    _refuse_outside(args[0], "item: this rank is no part of the tensor's mesh: only its ranks know the value")
    whole = whole_unasked(func.name(), args[0], "the host reads the finished value")
    return func(whole, *args[1:], **kwargs)


def equal(_: Op, args: Args, __: Mapping[str, Any]) -> bool:
    """`torch.equal` of logical tensors: every rank of the mesh compares its part, then all agree.

    Rejected: an all-reduce over the world, as torch does it: a program of one mesh's ranks alone would hang.

    Raises: RuleError: on a rank outside the mesh, which nobody tells.
    """
    left, right = args
    if tuple(left.shape) != tuple(right.shape):
        return False
    _refuse_outside(left, "equal: this rank is no part of the tensors' mesh: only its ranks compare them")
    return bool((left == right).all().item())


def _refuse_outside(x: Any, why: str) -> None:
    if x._spec.coords is None:
        fix = "ask on its ranks and broadcast the answer, or redistribute to a mesh of all ranks"
        raise RuleError(f"{why}\n  fix: {fix}")


def is_set_to(_: Op, args: Args, __: Mapping[str, Any]) -> bool:
    """Are two tensors the same places of one storage? As far as autograd knows their bases."""
    one, two = args
    bases = [x if x._base is None else x._base for x in args]
    return bases[0] is bases[1] and all(
        tell(one) == tell(two) for tell in (offset_of, lambda x: x.shape, lambda x: x.stride())
    )


def has_same_storage_numel(_: Op, args: Args, __: Mapping[str, Any]) -> bool:
    """Is their memory of one length? Forward mode asks it of a value and its tangent, in unlike layouts too.

    Of the logical tensors: what their sizes, strides and beginnings reach to is what torch knows of them.
    """
    one, two = (x.untyped_storage().nbytes() // x.element_size() for x in args)
    return bool(one == two)


READS: dict[Op, Callable[..., Any]] = {
    aten._local_scalar_dense.default: item,
    aten.is_nonzero.default: item,
    aten.equal.default: equal,
    aten.is_set_to.default: is_set_to,
    aten._has_same_storage_numel.default: has_same_storage_numel,
}
