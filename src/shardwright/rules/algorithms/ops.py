"""Small ops that algorithms are written with; on plain tensors they are trivial.

`shardwright::positions(x, dim)`: 0, 1, ... along a dim of x, placed as x is along it.
`shardwright::finish(x, why)`: x; of a DTensor, with every pending axis reduced, once, and nothing else moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.layout.dtypes import HALF
from shardwright.rules.rule import rule

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
_LIBRARY.define("positions(Tensor x, int dim) -> Tensor")
_LIBRARY.define("finish(Tensor x, str why) -> Tensor")


def _finish(x: Tensor, why: str) -> Tensor:  # noqa: ARG001  for the record of a DTensor
    same: Tensor = torch.ops.aten.alias.default(x)
    return same


_LIBRARY.impl(
    "positions", lambda x, dim: torch.arange(x.shape[dim], device=x.device), "CompositeExplicitAutograd"
)
_LIBRARY.impl("finish", _finish, "CompositeExplicitAutograd")
FINISH: torch._ops.OpOverload = torch.ops.shardwright.finish.default


rule(
    "shardwright::positions",
    "~...[dim:d] -> d",
    local=lambda _op, held, x, _dim: held["d"].positions(x.device),
    held=("d",),
)


def positions(x: Tensor, dim: int) -> Tensor:
    """The logical indices along `dim`, cut like x along it:  [.., d, ..] -> i64[1.., d, ..1]."""
    shape = [1] * x.dim()
    shape[dim] = x.shape[dim]
    return indices(x, dim).view(shape)


def indices(x: Tensor, dim: int) -> Tensor:
    """The logical indices along `dim`, cut like x along it:  [.., d, ..] -> i64[d]."""
    found: Tensor = torch.ops.shardwright.positions.default(x, dim)
    return found


def finish(x: Tensor, why: str = "") -> Tensor:
    """`x` without pending axes: each is reduced once, here, and not by every op that reads it."""
    done: Tensor = torch.ops.shardwright.finish.default(x, why)
    return done


def wide(x: Tensor) -> Tensor:
    """`x` in the type that the kernels accumulate in."""
    return x.to(torch.float32) if x.dtype in HALF else x
