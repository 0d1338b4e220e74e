"""Short ways to write calls, layouts and decisions in tests of rules."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Placement
from shardwright.rules import Call, Decision, TensorInfo, propagate

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Call:
    """The call of `op` on meta tensors, its results found by running it."""
    made = tree_flatten(op(*args, **kwargs))[0]
    results = tuple(info(x) if isinstance(x, torch.Tensor) else None for x in made)
    described, named = tree_map_only(torch.Tensor, info, (args, kwargs))
    frozen = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in described)
    return Call(op, frozen, tuple(named.items()), results)


def info(x: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(x.shape), tuple(x.stride()), x.dtype)


def mesh(**axes: int) -> MeshShape:
    return MeshShape(tuple(axes), tuple(axes.values()))


def decide(
    made: Call, on: MeshShape, *placements: tuple[Placement, ...] | Placement, **order: Any
) -> Decision:
    """Propagate `made` with one placement, or one tuple of them, per operand."""
    layouts = [
        Layout(on, p if isinstance(p, tuple) else (p,), x.shape, dtype=x.dtype, stride=x.stride, **order)
        for p, x in zip(placements, made.operands, strict=True)
    ]
    return propagate(made, layouts)


def shown(decision: Decision) -> str:
    """`inputs -> outputs` as text of layouts, without dtypes."""
    inputs = ", ".join(str(layout) for layout in decision.inputs)
    outputs = ", ".join(str(layout) for layout in decision.outputs)
    return f"{inputs} -> {outputs}".replace("f32", "")
