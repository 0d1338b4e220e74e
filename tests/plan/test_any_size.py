"""The works of plans for sizes that are symbols, at sizes that they were not made for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import shardwright as sw
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.plan import plan_redistribution
from shardwright.plan.any_size import _DifferError, _examples, _value, plans_for
from shardwright.plan.holders import every_coords
from tests.generators import numbered
from tests.plan.lockstep import Lockstep, held_by_all

_CUT, _COLUMNS, _WHOLE, _SUM, _MOST = (
    sw.Shard(0),
    sw.Shard(1),
    sw.Replicate(),
    sw.Partial("sum"),
    sw.Partial("max"),
)
_MOVES = [
    ((2,), [_CUT], [_COLUMNS]),
    ((3,), [_COLUMNS], [_WHOLE]),
    ((4,), [_SUM], [_CUT]),
    ((3,), [_MOST], [_WHOLE]),
    ((2,), [_COLUMNS], [_SUM]),
    ((2, 2), [_CUT, _CUT], [_COLUMNS, _CUT]),
    ((2, 2), [_CUT, _SUM], [_WHOLE, _CUT]),
    ((2, 3), [_COLUMNS, _CUT], [_WHOLE, _WHOLE]),
    ((3, 2), [_SUM, _SUM], [_WHOLE, _COLUMNS]),
]


class _Symbol(int):
    """A size of which nobody may know that it is a number."""


@pytest.mark.parametrize("shape", [(24, 36), (61, 6), (38, 43), (1201, 8)], ids=str)
@pytest.mark.parametrize(("mesh", "before", "after"), _MOVES, ids=str)
def test_works_for_symbols_move_the_value_as_the_plan_for_the_numbers_does(mesh, before, after, shape):
    """Rows are a symbol, columns where they are many; the ranks divide some of them."""
    mesh_shape = MeshShape(("a", "b")[: len(mesh)], mesh)
    source, target = (Layout(mesh_shape, p, shape, dtype=torch.float64) for p in (before, after))
    sizes = [_Symbol(size) if size > 8 else size for size in shape]
    made = [layout.with_shape([7 if size > 8 else size for size in shape]) for layout in (source, target)]
    plans = {seat: plans_for(*made, sizes, seat) for seat in every_coords(mesh)}
    full = numbered(source)
    held, sent = held_by_all(source, full), 0
    for number, (first, _, works) in enumerate(plans[(0,) * len(mesh)]):
        steps = [
            SimpleNamespace(work=lambda seat, n=number, at=at: plans[seat][n].works[at])
            for at in range(len(works))
        ]
        run = Lockstep(replace(first, steps=tuple(steps)))
        assert all(tuple(x.shape) == each[number].shape for x, each in zip(held, plans.values(), strict=True))
        held = run.run(held)
        sent += run.bytes_sent
    assert torch.equal(target.join(held), full)
    plan = plan_redistribution(source, target)
    assert plan.crosses_several_axes or sent == plan.total_bytes


def test_numbers_that_only_begin_like_a_polynomial_are_refused():
    """A third of a size, rounded up, is linear at two sizes that stand side by side."""
    examples = _examples([2, 3])
    lines = [3 * n * m + 2 * n + 5 for n, m in examples]
    assert _value(examples, [10, 7], lines) == 235
    for wrong in (
        [-(-n // 3) for n, _ in examples],
        [n * n for n, _ in examples],
        [min(n, 900) for n, _ in examples],
    ):
        with pytest.raises(_DifferError):
            _value(examples, [10, 7], wrong)
