"""Tensors in awkward memory: each is a view of a larger base, that starts elsewhere or lies otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch

View = Callable[[torch.Tensor], torch.Tensor]


def _around(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    """`x` between rows of other values."""
    shape = list(x.shape)
    shape[dim] += before + after
    base = x.new_zeros(shape)
    base.narrow(dim, before, x.shape[dim]).copy_(x)
    return base


def _spread(x: torch.Tensor) -> torch.Tensor:
    base = x.new_zeros((2 * x.shape[0] + 1, *x.shape[1:]))
    base[1::2].copy_(x)
    return base


def _other_way_round(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).clone(memory_format=torch.contiguous_format)


# The base that holds the values of `x`, and the view of it; an expanded one has the first row in every row.
FORMS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, View]]] = {
    "whole": lambda x: (x.clone(), lambda base: base),
    "later rows": lambda x: (_around(x, 0, 3, 0), lambda base: base[3:]),
    "inner columns": lambda x: (_around(x, -1, 2, 1), lambda base: base[..., 2:-1]),
    "transposed": lambda x: (_other_way_round(x), lambda base: base.transpose(0, -1)),
    "every other row": lambda x: (_spread(x), lambda base: base[1::2]),
    "expanded": lambda x: (_around(x[:1], 0, 1, 0), lambda base: base[1:].expand(x.shape)),
}


def lain(x: torch.Tensor, name: str) -> tuple[torch.Tensor, View]:
    """A tensor in this form; one without dims is the second of three."""
    if not x.dim():
        return torch.stack([x, x, x]), lambda base: base[1]
    return FORMS["later rows" if name == "expanded" and not x.numel() else name](x)
