"""Losses: rewritten on the logical call, so that a mean divides by the logical count, weights and all.

The fused kernels divide by what they see; a part of the batch sees the wrong count. Their decompositions
(torch's own) pick, multiply and sum, and every one of these steps has a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from shardwright.errors import RuleError
from shardwright.rules.registry import rewrite

_DECOMPOSED = """
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    soft_margin_loss soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    binary_cross_entropy_with_logits
"""


@lru_cache(maxsize=256)
def _decomposition(op: torch._ops.OpOverload) -> Callable[..., Any]:
    from torch._decomp import decomposition_table  # noqa: PLC0415  half a second that few runs need

    found = decomposition_table.get(op)
    if found is None:
        raise RuleError(f"{op.name()}: this version of torch has no decomposition for it")
    return found


@rewrite(*(f"aten::{name}.default" for name in _DECOMPOSED.split()))
def decomposed(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> object:
    """The loss, or its gradient, step by step."""
    return _decomposition(op)(*args, **kwargs)

