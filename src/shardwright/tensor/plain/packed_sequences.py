"""Packed and padded sequences: which rows of a padded batch stand where is the host's business.

The lengths, and how many rows each step has, are sizes written as a tensor; torch takes them on the host
alone. So torch itself packs the numbers of the rows there, and says what it says of bad lengths; the data are
then selected by those numbers, by the rules of the ops that do it, whatever their placements.

A list of sequences torch pads by copies into plain memory of its own, where gradients would be lost: here
each is padded by itself, and they are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwright.compat import pack_padded_rows, pad_packed_rows, pad_sequences
from shardwright.tensor.plain.boundary import Own


def _packed(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: A002  torch's name
    numbers = torch.arange(input.shape[0] * input.shape[1], device=input.device).view(input.shape[:2])
    rows, sizes = pack_padded_rows(numbers, lengths, batch_first)
    return input.flatten(0, 1).index_select(0, rows), sizes


def _padded(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(data.shape[0], device=data.device)
    rows, lengths = pad_packed_rows(numbers, batch_sizes, False, -1, total_length)
    flat = rows.flatten()
    found = data.index_select(0, flat.clamp_min(0))
    absent = (flat < 0).view(-1, *[1] * (data.ndim - 1))
    made = found.masked_fill(absent, padding_value).unflatten(0, rows.shape)
    return (made.transpose(0, 1) if batch_first else made), lengths  # a view, as torch's


def _padded_alike(
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: Literal["left", "right"] = "right",
) -> Tensor:
    shapes = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in sequences]
    whole = pad_sequences(
        shapes, batch_first, padding_value, padding_side
    )  # says what torch says of bad ones
    length = whole.shape[1 if batch_first else 0]
    missing = [length - x.shape[0] for x in sequences]
    left = padding_side == "left"
    padded = [
        pad(x, [0, 0] * (x.dim() - 1) + ([n, 0] if left else [0, n]), value=padding_value) if n else x
        for x, n in zip(sequences, missing, strict=True)
    ]
    return torch.stack(padded, 0 if batch_first else 1)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    pack_padded_rows: _packed,
    pad_packed_rows: _padded,
    pad_sequences: _padded_alike,
}


OWN: dict[Any, Own] = dict.fromkeys(_INSTEAD, lambda func, args, kwargs: _INSTEAD[func](*args, **kwargs))
