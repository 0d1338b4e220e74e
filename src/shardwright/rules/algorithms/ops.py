"""Small ops that algorithms are written with; on plain tensors they are trivial.

`shardwright::positions(x, dim)`: 0, 1, ... along a dim of x, placed as x is along it.
`shardwright::finish(x, why)`: x; of a DTensor, with every pending axis reduced, once, and nothing else moved.
`shardwright::within(x, low, high, words)`: raises these words if a value lies outside; of a DTensor, one that
this rank holds.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from shardwright.compat import FakeTensor, assert_async, without_modes
from shardwright.layout.dtypes import HALF
from shardwright.rules.rule import rule

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")
_LIBRARY.define("positions(Tensor x, int dim) -> Tensor")
_LIBRARY.define("finish(Tensor x, str why) -> Tensor")
_LIBRARY.define("within(Tensor x, float? low, float? high, str words) -> ()")


def _finish(x: Tensor, why: str) -> Tensor:  # noqa: ARG001  for the record of a DTensor
    same: Tensor = torch.ops.aten.alias.default(x)
    return same


def _within(x: Tensor, low: float | None, high: float | None, words: str) -> None:
    """As kernels look: on the CPU at once, on a GPU when it comes to that, since nobody waits for its values.

    Raises: RuntimeError: a value on the CPU lies outside, as what is not a number does.
    """
    if not x.numel() or x.is_meta:
        return
    if x.device.type != "cpu" or isinstance(x, FakeTensor):
        assert_async(_are_within(x, low, high), words)
        return
    with without_modes():
        if not _are_within(x, low, high):
            raise RuntimeError(words)


def _are_within(x: Tensor, low: float | None, high: float | None) -> Tensor:
    least, most = x.aminmax()
    return (least >= (-inf if low is None else low)) & (most <= (inf if high is None else high))


_LIBRARY.impl(
    "positions", lambda x, dim: torch.arange(x.shape[dim], device=x.device), "CompositeExplicitAutograd"
)
_LIBRARY.impl("finish", _finish, "CompositeExplicitAutograd")
_LIBRARY.impl("within", _within, "CompositeExplicitAutograd")
FINISH: torch._ops.OpOverload = torch.ops.shardwright.finish.default
WITHIN: torch._ops.OpOverload = torch.ops.shardwright.within.default


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


def within(x: Tensor, low: float | None, high: float | None, words: str) -> Tensor:
    """`x`, finished, whose values lie in these bounds.

    For steps in place of a kernel that looks at every value. A compiled graph looks at none, as torch's.

    Raises: RuntimeError: a value that this rank holds lies outside.
    """
    if torch.compiler.is_compiling():
        return x
    x = finish(x, "values that have bounds")
    torch.ops.shardwright.within.default(x, low, high, words)
    return x


def wide(x: Tensor) -> Tensor:
    """`x` in the type that the kernels accumulate in."""
    return x.to(torch.float32) if x.dtype in HALF else x
