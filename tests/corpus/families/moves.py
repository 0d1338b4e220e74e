"""Redistribution as one rank runs it: all pairs of kinds, with the backward; lists; onto another mesh."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwright as sw
from tests.corpus.seen import seen
from tests.corpus.unit import Case, Sizes, Unit
from tests.corpus.world import AXES
from tests.plan.kinds import all_kinds
from tests.views.placed import place

_SHAPES = ((8, 6), (7, 3))
_TWO_AXES = 400  # pairs of layouts for each mesh of two axes and shape
_LISTS = 60
_OTHER_MESH = 150


def units() -> Iterator[Unit]:
    """One for each kind of source on one axis, some for all pairs on two."""
    for index, kind in enumerate(all_kinds(2, 2)):
        yield Unit("moves", f"from {type(kind).__name__} {index}", ((2,), (3,)), partial(_one_axis, index))
    for shape in _SHAPES:
        words = f"of {'x'.join(map(str, shape))} over two axes"
        yield Unit("moves", words, ((2, 2), (2, 3)), partial(_two_axes, shape))
    yield Unit("moves", "lists", ((2,), (2, 2)), _lists)
    yield Unit("moves", "onto another mesh", ((6,),), _other_mesh)


def _one_axis(index: int, mesh: Sizes) -> Iterator[Case]:
    kinds = all_kinds(2, mesh[0])
    for shape, target in product(_SHAPES, kinds):
        yield _case(shape, (kinds[index],), None, (target,), None)


def _two_axes(shape: Sizes, mesh: Sizes) -> Iterator[Case]:
    draw, axes = random.Random(f"{mesh} {shape}"), AXES[len(mesh)]
    for _ in range(_TWO_AXES):
        source, target = (tuple(draw.choice(all_kinds(2, n)) for n in mesh) for _ in range(2))
        yield _case(shape, source, draw.sample(axes, 2), target, draw.sample(axes, 2))


def _case(shape: Any, source: Any, order: Any, target: Any, target_order: Any) -> Case:
    words = f"{list(shape)} {source} {order or ''} -> {target} {target_order or ''}"
    return Case(words, partial(seen, partial(_moved, shape, source, order, target, target_order)))


def _moved(shape: Any, source: Any, order: Any, target: Any, target_order: Any) -> Any:
    x = _tensor(shape, source, order)
    y = x.redistribute(placements=target, order=target_order)
    return y, _gradient(y, x)


def _gradient(y: Tensor, x: Tensor) -> Tensor:
    """That of a loss whose gradient is finished."""
    layout = sw.layout_of(y)
    finished = [sw.Replicate() if p.is_pending else p for p in layout.placements]
    weight = place(torch.ones(y.shape), finished, layout.order_names)
    return torch.autograd.grad(y, x, weight)[0]


def _tensor(shape: Any, placements: Any, order: Any = None) -> Tensor:
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    return place(x, placements, order).detach().requires_grad_()


def _lists(mesh: Sizes) -> Iterator[Case]:
    draw = random.Random(f"lists {mesh}")
    for number in range(_LISTS):
        shapes = [draw.choice([*_SHAPES, (5, 4), (1, 3)]) for _ in range(draw.randint(2, 5))]
        sources = [tuple(draw.choice(all_kinds(2, n)) for n in mesh) for _ in shapes]
        if draw.random() < 0.5:
            sources = [sources[0]] * len(shapes)
        target = tuple(draw.choice(all_kinds(2, n)) for n in mesh)
        words = f"{number}: {shapes} {sources} -> {target}"
        yield Case(words, partial(seen, partial(_moved_together, shapes, sources, target)))


def _moved_together(shapes: Any, sources: Any, target: Any) -> Any:
    leaves = [_tensor(shape, source) for shape, source in zip(shapes, sources, strict=True)]
    moved = sw.redistribute_many(leaves, target)
    return moved, torch.autograd.grad(sum((y * 1).sum() for y in moved), leaves)


def _other_mesh(_: Sizes) -> Iterator[Case]:
    """Meshes of some of the six ranks, in any order; this rank may be in one of them, or in none."""
    draw = random.Random("another mesh")
    for _ in range(_OTHER_MESH):
        sizes, others = (draw.choice([(2,), (3,), (2, 2), (2, 3)]) for _ in range(2))
        ranks, theirs = (draw.sample(range(6), torch.Size(s).numel()) for s in (sizes, others))
        source, target = (tuple(draw.choice(all_kinds(2, n)) for n in s) for s in (sizes, others))
        words = f"{source} on {_on(sizes, ranks)} -> {target} on {_on(others, theirs)}"
        yield Case(words, partial(seen, partial(_to_other, (sizes, ranks, source), (others, theirs, target))))


def _on(sizes: Any, ranks: Any) -> str:
    return f"{'x'.join(map(str, sizes))} {ranks}"


def _to_other(here: Any, there: Any) -> Any:
    sizes, ranks, placements = here
    mesh, other = _mesh(sizes, ranks, "a"), _mesh(*there[:2], "b")
    x = torch.arange(42.0).view(7, 6)
    layout = sw.Layout(mesh, placements, (7, 6), dtype=x.dtype)
    at = mesh.get_coordinate()
    local = layout.split(x, tuple(at)).clone() if at is not None else torch.empty(0)
    placed = sw.DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())
    return placed.redistribute(other, there[2])


def _mesh(sizes: Any, ranks: Any, letter: str) -> DeviceMesh:
    names = tuple(f"{letter}{i}" for i in range(len(sizes)))
    return DeviceMesh("cpu", torch.tensor(ranks).view(sizes), mesh_dim_names=names)
