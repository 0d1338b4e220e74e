"""`fill_diagonal_`: torch finds the diagonal in memory, from where it believes that the tensor starts.

torch's composite asks the wrapper for its storage offset and gets the local tensor's, which is another one on
every rank; here the diagonal is found from the logical one. Nothing else is different.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.tensor import boundary


def fill_diagonal_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill the diagonal of the logical tensor, whatever it is a view of. Cost: none.

    Raises: RuleError: wrapped, on a view with gaps that needs a gradient: torch writes outside of the view.
    """
    x, value, wrap = _given(*args, **kwargs)
    if not isinstance(x, TorchDTensor) or not _has_diagonal(x):
        return func(*args, **kwargs)  # torch's own errors
    rows, columns = x.shape[0], x.shape[1]
    size, step = min(rows, columns), sum(x.stride())
    lines = [_line(x, size, step, 0)]
    if wrap and x.dim() == 2 and rows > columns + 1:
        again = -(-x.numel() // (columns + 1)) - size
        lines.append(_line(x, again, step, x.stride(0) * (columns + 1)))
    for line in lines:
        line.fill_(value)
    return x


def _given(x: torch.Tensor, fill_value: float, wrap: bool = False) -> tuple[torch.Tensor, float, bool]:
    return x, fill_value, wrap


def _has_diagonal(x: torch.Tensor) -> bool:
    return x.dim() >= 2 and x.numel() > 0 and (x.dim() == 2 or len(set(x.shape)) == 1)


def _line(x: torch.Tensor, size: int, step: int, offset: int) -> torch.Tensor:
    """Every `step`-th place of the tensor's memory, from `offset` on; as the user would take it."""
    start = boundary.call(torch.Tensor.storage_offset, (x,), {})
    line = boundary.call(torch.Tensor.as_strided, (x, (size,), (step,), start + offset), {})
    return cast("torch.Tensor", line)


boundary.OWN[torch.Tensor.fill_diagonal_] = fill_diagonal_
