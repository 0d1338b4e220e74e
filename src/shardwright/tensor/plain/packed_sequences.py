"""Packed sequences: which rows of a padded batch stand where in the packed one is the host's business.

The lengths, and how many rows each step has, are sizes written as a tensor; torch takes them on the host
alone. So torch itself packs the numbers of the rows there, and says what it says of bad lengths; the data are
then selected by those numbers, by the rules of the ops that do it, whatever their placements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.compat import pack_padded_rows, pad_packed_rows
from shardwright.tensor.plain.boundary import Own


def _pack(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return _packed(*args, **kwargs)


def _packed(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: A002  torch's name
    numbers = torch.arange(input.shape[0] * input.shape[1]).view(input.shape[:2])
    rows, sizes = pack_padded_rows(numbers, lengths, batch_first)
    return input.flatten(0, 1).index_select(0, rows), sizes


def _pad(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return _padded(*args, **kwargs)


def _padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(data.shape[0])
    rows, lengths = pad_packed_rows(numbers, batch_sizes, batch_first, -1, total_length)
    flat = rows.flatten()
    found = data.index_select(0, flat.clamp_min(0))
    absent = (flat < 0).view(-1, *[1] * (data.ndim - 1))
    return found.masked_fill(absent, padding_value).unflatten(0, rows.shape), lengths


OWN: dict[Any, Own] = {pack_padded_rows: _pack, pad_packed_rows: _pad}
