"""Ops that are always taken apart before anything is sharded: their steps have rules, the whole has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.compat import decompositions
from shardwright.errors import RuleError
from shardwright.remember import remembered
from shardwright.rules.registry import rewrite


@remembered(256)
def _decomposition(op: torch._ops.OpOverload) -> Callable[..., Any]:
    found = decompositions().get(op)
    if found is None:
        raise RuleError(f"{op.name()}: this version of torch has no decomposition for it")
    return found


def decomposed(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> object:
    """The op step by step, as torch's own tables take it apart."""
    return _decomposition(op)(*args, **kwargs)


def take_apart(*ops: str) -> None:
    """Register `decomposed` for these overloads."""
    rewrite(*ops)(decomposed)


@rewrite("prims::add", "prims::sub", "prims::mul", "prims::div")
def _as_aten(op: torch._ops.OpOverload, one: torch.Tensor, other: torch.Tensor) -> object:
    """The op that has rules. Forward mode asks torch's references what a product with zeros looks like."""
    whole = op is torch.ops.prims.div.default and not (one.is_floating_point() or one.is_complex())
    rounding = {"rounding_mode": "trunc"} if whole else {}
    return getattr(torch.ops.aten, op._opname)(one, other, **rounding)


@rewrite("aten::_new_zeros_with_same_feature_meta")
def _as_the_primal_lies(
    op: torch._ops.OpOverload,  # noqa: ARG001
    tangent: torch.Tensor,
    primal: torch.Tensor,
    *,
    self_num_batch_dims: int = 0,
) -> torch.Tensor:
    """Where a tangent that lies otherwise than its primal is copied to: it is cut as the primal is."""
    batch = tangent.shape[:self_num_batch_dims]
    return torch.zeros_like(primal.expand(*batch, *primal.shape) if batch else primal)
