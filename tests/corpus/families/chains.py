"""Views of views, which make placements of their own, and what is done with these afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import shardwright as sw
from tests.corpus.seen import seen
from tests.corpus.unit import Case, Sizes, Unit
from tests.views.placed import place
from tests.views.sweep import layouts, partitions

_SHAPE = (6, 4, 5)
_MESHES = ((2,), (3,), (2, 2))
_PAIRS = 8

CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: x.flatten(),
    "flatten inner": lambda x: x.flatten(1),
    "transpose, flatten": lambda x: x.transpose(0, 1).flatten(0, 1),
    "split a dim": lambda x: x.view(2, 3, 4, 5),
    "split, permute": lambda x: x.view(3, 2, 4, 5).permute(1, 2, 0, 3),
    "split, permute, flatten": lambda x: x.view(3, 2, 4, 5).permute(1, 0, 3, 2).flatten(0, 1),
    "regroup": lambda x: x.view(4, 6, 5),
    "regroup twice": lambda x: x.reshape(8, 3, 5).reshape(2, 12, 5),
    "slice": lambda x: x[1:5],
    "slice with steps": lambda x: x[::2, 1:, ::3],
    "slice, flatten": lambda x: x[:, 1:3].flatten(),
    "slice, slice": lambda x: x[1:][::2],
    "select, slice": lambda x: x[2][1:, 2:],
    "flip by index": lambda x: x.flip(0)[1:],
    "unfold": lambda x: x.unfold(0, 2, 2),
    "unfold, overlapping": lambda x: x.unfold(0, 3, 1),
    "diagonal": lambda x: x.diagonal(0, 0, 1),
    "diagonal, flatten": lambda x: x.diagonal(1, 0, 2).flatten(),
    "expand": lambda x: x[:1].expand(3, 4, 5),
    "expand, flatten": lambda x: x.unsqueeze(1).expand(6, 2, 4, 5).flatten(0, 1),
    "chunk": lambda x: x.chunk(4, 0)[1],
    "as_strided": lambda x: x.as_strided((3, 4), (40, 1), 2),
    "squeeze": lambda x: x[2:3].squeeze(0),
    "movedim, reshape": lambda x: x.movedim(2, 0).reshape(10, 12),
}

AFTER: dict[str, Callable[[Tensor], Any]] = {
    "": lambda x: x,
    "relu, sum": lambda x: (x.relu(), x.sum(), x.sum(-1), x.amax(0)),
    "softmax": lambda x: x.softmax(0),
    "with itself": lambda x: (x + x, x * x.detach()),
    "write": lambda x: x.mul_(2),
    "write a part": lambda x: x[:1].fill_(0),
    "whole": lambda x: x.full_tensor(),
}


def units() -> Iterator[Unit]:
    """One for each chain."""
    for name in CHAINS:
        yield Unit("chains", name, _MESHES, partial(_cases, name))


def _cases(name: str, mesh: Sizes) -> Iterator[Case]:
    for number, (placements, order) in enumerate(_layouts(mesh)):
        for after in ("", list(AFTER)[1 + number % (len(AFTER) - 1)]):
            words = f"{placements} {order or ''} {after}"
            yield Case(words, partial(seen, partial(_run, name, placements, order, after)))


def _layouts(mesh: tuple[int, ...]) -> list[Any]:
    if len(mesh) == 1:
        return [((p,), None) for p in partitions(_SHAPE, mesh[0]) if not isinstance(p, sw.BlockCyclic)]
    return layouts(torch.empty(_SHAPE), 1, _PAIRS)


def _run(name: str, placements: Any, order: Any, after: str) -> Any:
    x = place(torch.arange(120.0).view(_SHAPE), placements, order).detach().requires_grad_()
    base = x * 1
    view = CHAINS[name](base)
    out = AFTER[after](view)
    gradient = None
    if after != "whole":
        total = sum(v.sum() for v in (out if isinstance(out, tuple) else (out,)))
        (gradient,) = torch.autograd.grad(total, x)
    return view, out, base, gradient
