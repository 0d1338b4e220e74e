"""Faults planted in the dispatch of a rank process, to see that a sweep finds them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from shardwright.tensor.dispatch import call
from tests.ops.cases import Options
from tests.ops.ranks import check_operator

_run = call.run


def _broken(prepared: Any, func: torch._ops.OpOverload, args: Any, kwargs: Any, tensors: Any) -> Any:
    """The right result, but for four operators on a cut operand."""
    name = func.name().split(".")[0].removeprefix("aten::").rstrip("_")
    cut = any(p.is_shard() for p in tensors[0].placements)
    out = _run(prepared, func, args, kwargs, tensors)
    if not cut:
        return out
    if name == "relu":
        out._local_tensor.add_(1)
    if name == "cos" or (name == "sin" and dist.get_rank() == 1):
        raise ValueError(f"planted in {name}")
    if name == "tan" and dist.get_rank() == 1:
        os._exit(7)
    return out


def check_planted(name: str, options: Options, file: str, start: int) -> int:
    """`check_operator` on ranks where the faults are planted: they are of no other use afterwards."""
    call.run = _broken
    return check_operator(name, options, file, start)
