"""Tensors of a trace, which cannot be sent between pairs of ranks."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter


def is_traced(x: Tensor) -> bool:
    """True for the fake and functional tensors of a trace."""
    return type(x) not in (Tensor, Parameter)
