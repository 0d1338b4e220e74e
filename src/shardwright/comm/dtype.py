"""How a tensor travels: which dtypes a backend moves and reduces itself, and what carries the others."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.errors import PlanError

# What gloo and NCCL both move and reduce as it is; float8, complex, int16 and bool travel as bytes.
NATIVE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.int8,
        torch.uint8,
    }
)


def as_bytes(x: Tensor) -> Tensor:
    """The same memory as a flat uint8 tensor (a copy first if `x` is not contiguous)."""
    return _bytes_of(x.contiguous().view(-1))


def _bytes_of(run: Tensor) -> Tensor:
    """torch shows no bytes of one element (or none) whose stride is not 1, and calls it contiguous."""
    return (run if run.numel() > 1 else run.as_strided(run.shape, (1,))).view(torch.uint8)


def bits(run: Tensor) -> Tensor:
    """A flat contiguous tensor as the backends can move it in place: itself, or its memory as uint8."""
    return run if run.dtype in NATIVE else _bytes_of(run)


def carrier(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype in which values of `dtype` are reduced: itself, or a wider one.

    Raises: PlanError: this reduction has no meaning for this dtype.
    """
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if op == "avg" and exact:
        raise PlanError(
            f"avg of {dtype}: an integer cannot hold the average; use sum, or convert to a float first"
        )
    if dtype.is_complex and op not in ("sum", "avg"):
        raise PlanError(f"{op} of {dtype}: complex numbers have no native {op}; gather the terms instead")
    if dtype in NATIVE or dtype.is_complex:
        return dtype
    return torch.int32 if exact else torch.float32
