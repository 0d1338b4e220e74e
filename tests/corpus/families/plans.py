"""Redistribution as plans, without ranks: pairs of kinds on one to four axes, in any order; two meshes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import shardwright as sw
from shardwright.plan import Plan
from tests.corpus.seen import error_text, one_line
from tests.corpus.unit import WITHOUT, Case, Sizes, Unit
from tests.plan.all_pairs import all_layouts
from tests.plan.kinds import random_pairs
from tests.plan.two_meshes import random_pairs as pairs_between

# mesh -> shapes, and how many of the ordered pairs are planned
_PAIRS = {
    (2,): (((8, 6), (7, 3), (0, 5)), 64),
    (4,): (((1024, 1024), (1021, 1022), (7, 3), (0, 5)), 64),
    (2, 2): (((1024, 1024), (1021, 1022), (7, 3), (0, 5)), 600),
    (2, 3): (((1024, 1024), (1021, 1022), (7, 3), (0, 5)), 600),
    (2, 2, 2): (((1024, 1024), (7, 3)), 500),
}
_ORDERED = {(2,): 300, (4,): 500, (2, 2): 1500, (2, 3): 1500, (2, 2, 2): 600, (2, 1, 2, 2): 400}
_BETWEEN = 1500


def units() -> Iterator[Unit]:
    """One for each mesh and shape."""
    for sizes, (shapes, count) in _PAIRS.items():
        for shape in shapes:
            words = f"{_by(sizes)} of {_by(shape)}"
            yield Unit("plans", words, WITHOUT, partial(_pairs, sizes, shape, count))
    for sizes, count in _ORDERED.items():
        yield Unit("plans", f"{_by(sizes)} in any order", WITHOUT, partial(_ordered, sizes, count))
    yield Unit("plans", "between two meshes", WITHOUT, _between)


def _by(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def _pairs(sizes: Sizes, shape: Sizes, count: int, _: Sizes) -> Iterator[Case]:
    layouts, draw = all_layouts(sizes, shape), random.Random(f"{sizes} {shape}")
    every = [(a, b) for a in range(len(layouts)) for b in range(len(layouts))]
    for a, b in every if len(every) <= count else draw.sample(every, count):
        yield _case(layouts[a], layouts[b])


def _ordered(sizes: Sizes, count: int, _: Sizes) -> Iterator[Case]:
    return (_case(*pair) for pair in random_pairs(sizes, count, seed=5))


def _between(_: Sizes) -> Iterator[Case]:
    for source, target in pairs_between(_BETWEEN, seed=5):
        meshes = f" ranks {list(source.ranks)} -> {list(target.ranks)}"
        yield _case(source, target, meshes)


def _case(source: sw.Layout, target: sw.Layout, more: str = "") -> Case:
    orders = "".join(f" {','.join(layout.order_names)}" for layout in (source, target))
    return Case(f"{source} -> {target}{orders}{more}", partial(_told, source, target))


def _told(source: sw.Layout, target: sw.Layout) -> str:
    try:
        return plan_text(sw.plan_redistribution(source, target))
    except Exception as error:  # noqa: BLE001 - a refusal is what the user sees
        return f"raises {error_text(error)}"


def plan_text(plan: Plan) -> str:
    """All that the plan says of itself, without its first line, which is the case."""
    return f"{one_line(' | '.join(str(plan).splitlines()[1:]))} | peak {plan.peak_bytes} B"
