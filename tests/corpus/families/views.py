"""Every view of torch's database under every partition, with its backward and with writes through it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import shardwright as sw
from tests.corpus.seen import arguments_text, seen
from tests.corpus.unit import Case, Sizes, Unit
from tests.torch_samples import OF_A_SET
from tests.views import sweep
from tests.views.placed import place

_MESHES = ((2,), (2, 2))
_SAMPLES = 1  # of each view
_PAIRS = 6


def units() -> Iterator[Unit]:
    """One for each view."""
    for info in sweep.infos():
        if info.full_name in OF_A_SET:
            continue
        yield Unit("views", info.full_name, _MESHES, partial(_cases, info))


def _cases(info: Any, _: Sizes) -> Iterator[Case]:
    for index, sample in enumerate(sweep.samples(info, _SAMPLES)):
        firsts = _tensors(sample.input)
        if not firsts or prod(firsts[0].shape) > 10_000:
            continue
        text = arguments_text((sample.input, *sample.args), sample.kwargs)
        for placements, order in sweep.layouts(firsts[0], index, _PAIRS):
            words = f"{text} {placements} {order or ''}"
            yield Case(words, partial(seen, partial(_run, info, sample, placements, order)))


def _run(info: Any, sample: Any, placements: Any, order: Any) -> Any:
    """Results, gradients, and what results and operands are after writes."""
    case = sweep.Case(info, sample, placements, order)
    x = _tensors(sample.input)[0]
    differentiable = x.is_floating_point() or x.is_complex()
    operands = case.firsts(wrapped=True, differentiable=differentiable)
    out = case.call(operands, wrapped=True)
    wanted = [v for v in _tensors(out) if v.requires_grad]
    gradients = _gradients(wanted, _tensors(operands)) if wanted else None
    return out, gradients, _written(case, _tensors(out))


def _gradients(outs: list[Tensor], leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
    ones = [torch.ones(x.shape, dtype=x.dtype) for x in outs]
    layouts = [sw.layout_of(x) for x in outs]
    given = [place(v, at.placements, at.order_names) for v, at in zip(ones, layouts, strict=True)]
    return torch.autograd.grad(outs, leaves, given, allow_unused=True)


def _written(case: sweep.Case, outs: list[Tensor]) -> Any:
    """Where writes into views reach the base and the other way round, as layouts; None where none is one."""
    if not any(x._is_view() for x in outs) or case.info.name.endswith("scatter"):
        return None
    with torch.no_grad():
        operands = case.firsts(wrapped=True, differentiable=False)
        views = _tensors(case.call(operands, wrapped=True))
        bases = _tensors(operands)
        for x in chain(views, bases):
            if not _overlaps(x):
                x.mul_(2)
        return views, [x * 1 for x in bases]


def _overlaps(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)) or (
        x.numel() > 0 and sum((s - 1) * t for s, t in zip(x.shape, x.stride(), strict=True)) + 1 < x.numel()
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
