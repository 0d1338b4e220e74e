"""Dtypes: their short names, as the text of a layout writes them, and the half types."""

from __future__ import annotations

import re

import torch

from shardwright.errors import LayoutError

# What kernels compute in float32 and round when they are done.
HALF = frozenset({torch.float16, torch.bfloat16})
_WORDS = (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"), ("bfloat", "bf"))


def dtype_name(dtype: torch.dtype) -> str:
    """`f32` for torch.float32, `bf16`, `i64`, `u8`, `c64`, `bool`."""
    name = str(dtype).removeprefix("torch.")
    for word, short in _WORDS:
        if re.match(rf"{word}\d", name):
            return short + name.removeprefix(word)
    return name


_BY_NAME = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_of(name: str) -> torch.dtype:
    """The dtype with this short name.

    Raises: LayoutError: there is none.
    """
    if name not in _BY_NAME:
        raise LayoutError(f"{name!r} is not a dtype; examples: f32, bf16, i64, bool")
    return _BY_NAME[name]
