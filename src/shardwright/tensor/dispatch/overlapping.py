"""Tensors with an element at several indices (windows that overlap), and the writes that depend on which.

On one device such elements are one place in memory: an op that reads what it writes does it several times,
in an order that is the kernel's own. Where the dims are cut the windows are copies, which know of no order.
An op that writes the same whichever index is meant goes through them; every other op is refused.

Rejected: doing the op once per element. One device does not, and `mul_` would silently differ from it.
"""

from __future__ import annotations

from itertools import combinations
from math import lcm
from typing import Any, NoReturn

import torch

from shardwright.errors import RuleError
from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition
from shardwright.remember import remembered
from shardwright.rules.call import Args, Kwargs, Op

# Write one value wherever they write: nothing, or a number, is given.
_ONE_VALUE = {"fill": "value", "zero": None, "masked_fill": "value", "index_fill": "value"}
_ONE_VALUE |= {"copy": "src", "index_put": "values", "_index_put_impl": "values"}
# Done again, they change nothing.
_IDEMPOTENT = frozenset({"relu", "abs", "sign", "floor", "ceil", "trunc"})
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "maximum", "minimum"})


def overlaps(layout: Layout) -> bool:
    """Is an element of the logical tensor at several indices?"""
    return bool(_meeting(layout.shape, layout.stride)) or 0 in _strides(layout.shape, layout.stride)


@remembered(4096)
def is_cut_there(layout: Layout) -> bool:
    """Is a dim cut along which elements repeat, in step with another dim?"""
    dims = _meeting(layout.shape, layout.stride)
    if not dims:
        return False
    pairs = zip(layout.placements, layout.sizes, strict=True)
    return any(
        n > 1 and isinstance(p, Partition) and not dims.isdisjoint(p.cut_dims(layout.shape, n))
        for p, n in pairs
    )


def _strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    return [] if 0 in shape else [s for s, n in zip(stride, shape, strict=True) if n > 1]


@remembered(4096)
def _meeting(shape: tuple[int, ...], stride: tuple[int, ...]) -> frozenset[int]:
    """The dims of which two reach one place by different steps."""
    if 0 in shape:
        return frozenset()
    moving = [(dim, s, n) for dim, (s, n) in enumerate(zip(stride, shape, strict=True)) if s and n > 1]
    found: set[int] = set()
    for (one, s, n), (two, t, m) in combinations(moving, 2):
        meet = lcm(s, t)
        if meet // s < n and meet // t < m:
            found |= {one, two}
    return frozenset(found)


def writes_once(func: Op, args: Args, kwargs: Kwargs) -> bool:
    """Is what the op writes the same at every index of one element?"""
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if name in _IDEMPOTENT:
        return func._schema.name.endswith("_")  # not `out=`, which reads another tensor
    if name in _BOUNDS:
        in_place = func._schema.name.endswith("_")
        return in_place and not any(_is_many(v) for n, v in given.items() if n != "self")
    if name not in _ONE_VALUE or given.get("accumulate"):
        return False
    return not _is_many(given.get(_ONE_VALUE[name] or ""))


def _is_many(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() != 1


def refuse(func: Op) -> NoReturn:
    """Raises: RuleError: what such a write gives depends on the order in which one device would do it."""
    raise RuleError(
        f"{func.name()}: the written tensor has windows that overlap, along a dim that is cut: an element is "
        "written several times, and in which order is not defined\n  fix: write into the tensor that the "
        "windows were taken of, into one window at a time, or clone() the windows first"
    )
