"""Two meshes of one world: pairs of layouts to try, and a count by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.plan.holders import every_coords
from tests.plan.kinds import SHAPES, all_kinds
from tests.plan.lockstep import held_by_all

WORLD = 6
SIZES = ((1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 2), (1, 4))


def random_mesh(draw: random.Random, name: str, sizes, world: int) -> MeshShape:
    """Some ranks of the world in some order."""
    chosen = draw.choice(sizes)
    count = 1
    for size in chosen:
        count *= size
    ranks = draw.sample(range(world), count)
    return MeshShape(
        [f"{name}{i}" for i in range(len(chosen))], chosen, sorted(ranks) if draw.random() < 0.5 else ranks
    )


def random_layout(draw: random.Random, mesh: MeshShape, shape, stride, kinds=all_kinds) -> Layout:
    placements = [draw.choice(kinds(len(shape), n)) for n in mesh.sizes]
    order = draw.sample(mesh.axes, len(mesh.axes))
    return Layout(mesh, placements, shape, dtype=torch.float64, stride=stride, order=order)


def random_pairs(
    count: int, seed: int, kinds=all_kinds, sizes=SIZES, world: int = WORLD, shapes=(*SHAPES, ())
) -> Iterator[tuple[Layout, Layout]]:
    """Layouts of one tensor on two meshes: disjoint, overlapping, the same ranks in another order."""
    draw = random.Random(seed)
    for _ in range(count):
        shape = draw.choice(shapes)
        kind = kinds if shape else (lambda ndim, n: [p for p in kinds(1, n) if not hasattr(p, "dim")][:1])
        stride = (1, max(shape[0], 1)) if len(shape) == 2 and draw.random() < 0.3 else None
        yield tuple(
            random_layout(draw, random_mesh(draw, name, sizes, world), shape, stride, kind) for name in "ab"
        )


def spread_terms(layout: Layout, full: Tensor) -> list[Tensor]:
    """What every rank holds of a tensor, with terms of sums that differ from zero on all ranks."""
    held = held_by_all(layout, full)
    axes = [axis for axis in layout.order if axis in layout.pending_axes]
    if not axes or any(layout.placements[axis].reduce_op != "sum" for axis in axes):
        return held
    coords = every_coords(layout.sizes)
    last = {axis: layout.sizes[axis] - 1 for axis in axes}
    for i, at in enumerate(coords):
        end = tuple(last.get(axis, coord) for axis, coord in enumerate(at))
        if at != end:
            term = sum(at[axis] for axis in axes) + 1
            held[i] += term
            held[coords.index(end)] -= term
    return held


# ------------------------------------------------------------------------------------ counted by hand


def holders(layout: Layout) -> list[dict[int, tuple]]:
    """Per element, {rank: (its coordinates on the Pending axes, those on all axes that do not cut)}."""
    numbers = torch.arange(layout.numel).view(layout.shape)
    found: list[dict[int, tuple]] = [{} for _ in range(layout.numel)]
    pending = [axis for axis in layout.order if axis in layout.pending_axes]
    free = [axis for axis, p in enumerate(layout.placements) if p.is_replicated]
    for coords in every_coords(layout.sizes):
        key = tuple(coords[a] for a in pending), tuple(coords[a] for a in free)
        for box in layout.region(coords).boxes:
            for element in numbers[box.slices].reshape(-1).tolist():
                found[element][layout.mesh_shape.rank_at(coords)] = key
    return found


def least_elements(source: Layout, target: Layout) -> int:
    """Without terms on either side: the ranks that want an element and do not hold it."""
    return sum(
        len(wants.keys() - has.keys()) for has, wants in zip(holders(source), holders(target), strict=True)
    )


def least_for_terms(source: Layout, target: Layout) -> int:
    """With terms in the source, values in the target: by an exhaustive search per kind of element."""
    total, known = 0, {}
    for has, wants in zip(holders(source), holders(target), strict=True):
        terms = sorted({key[0] for key in has.values()})
        key = (tuple(sorted((rank, terms.index(of[0])) for rank, of in has.items())), tuple(sorted(wants)))
        if key not in known:
            known[key] = fewest_messages(dict(key[0]), [(rank,) for rank in key[1]], len(terms))
        total += known[key]
    return total


def fewest_messages(term_of: dict[int, int], groups: Sequence[tuple[int, ...]], terms: int) -> int:
    """Messages until every group has a rank that knows all terms; one carries all that its sender knows."""
    ranks = sorted({*term_of, *(rank for group in groups for rank in group)})
    place = {rank: i for i, rank in enumerate(ranks)}
    everything = (1 << terms) - 1
    start = tuple(1 << term_of[rank] if rank in term_of else 0 for rank in ranks)

    def done(state) -> bool:
        return all(any(state[place[rank]] == everything for rank in group) for group in groups)

    frontier, seen, steps = {start}, {start}, 0
    while not any(map(done, frontier)):
        following = set()
        for state in frontier:
            for i, j in product(range(len(ranks)), repeat=2):
                known = state[i] | state[j]
                if known != state[j]:
                    following.add((*state[:j], known, *state[j + 1 :]))
        frontier = following - seen
        seen |= frontier
        steps += 1
    return steps
