"""What fills plain tensors of a batch's rows: numbers by each element's logical index in the whole batch.

A draw that does not begin with rows (one number for all of them, noise of positions) is one for all ranks,
whose generators are in one state: it runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement.base import Replicate
from shardwright.rules.call import Args, Kwargs, Op
from shardwright.tensor.random.counter import (
    FILLING,
    Draw,
    bound,
    normal_numbers,
    uniform_numbers,
    whole_numbers,
)
from shardwright.tensor.random.rows import Scope
from shardwright.tensor.random.source import CounterSource

ALONE = MeshShape(("rows",), (1,))


def _chance(source: CounterSource, given: Mapping[str, Any], dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    chance: Tensor | float = given["self"] if given.get("p") is None else given["p"]
    return source.fraction() < chance


_DRAWS: dict[str, Draw] = {
    **FILLING,
    "bernoulli": _chance,
    "rand": uniform_numbers,
    "randn": normal_numbers,
    "randint": whole_numbers,
}


def draw_of_rows(scope: Scope, func: Op, args: Args, kwargs: Kwargs) -> Any:
    """The op's result; NotImplemented for what is no draw of rows.

    Raises: RuleError: a backward that runs this again would not know the rows.
    """
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    make = _DRAWS.get(name)
    if make is None or any(argument.is_out for argument in func._schema.arguments):
        return NotImplemented
    given = bound(func, args, kwargs)
    x = given.get("self")
    of_tensors = any(isinstance(given.get(each), Tensor) for each in ("high", "mean", "std"))
    if given["generator"] is not None or not (x is None or is_plain(x)) or of_tensors:
        return NotImplemented
    shape = tuple(given["size"] if x is None else x.shape)
    dtype = kwargs.get("dtype") or _dtype_of(name, x)  # a default of the schema is a number
    device = torch.device(given.get("device") or ("cpu" if x is None else x.device))
    known = None if dtype.is_complex or device.type == "meta" else scope.draw_for(shape)
    if known is None:
        return NotImplemented
    key, rows = known
    layout = Layout(ALONE, (Replicate(),), shape, dtype=dtype)
    value = make(CounterSource(key, layout, (0,), device, rows), given, dtype)
    if func._schema.is_mutable:
        func(torch.empty(0, dtype=dtype, device=device), *args[1:], **kwargs)  # torch judges the arguments
        return args[0].copy_(value)
    if x is None:
        return torch.empty(shape, dtype=dtype, device=device).copy_(value)
    return torch.empty_like(x, dtype=dtype, device=device).copy_(value)


def is_plain(x: Any) -> bool:
    """A plain tensor that has memory."""
    return isinstance(x, Tensor) and not isinstance(x, TorchDTensor) and not x.is_meta


def _dtype_of(name: str, x: Tensor | None) -> torch.dtype:
    if x is not None:
        return x.dtype
    return torch.int64 if name == "randint" else torch.get_default_dtype()
