"""The laws of redistribution, on any two layouts of one tensor."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.plan import plan_redistribution
from shardwright.plan.holders import every_coords
from tests.generators import LAW, layouts, numbered, orders, placements
from tests.plan.lockstep import Lockstep, held_by_all


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts of one tensor on one mesh, in any orders of application."""
    source = draw(layouts(dtype=torch.float64))
    mesh = source.mesh_shape
    chosen = [draw(placements(len(source.shape), n)) for n in mesh.sizes]
    order = draw(orders(tuple(mesh.axes)))
    return source, Layout(mesh, chosen, source.shape, dtype=source.dtype, order=order)


@LAW
@given(layout_pairs())
def test_a_redistribution_keeps_the_value_and_moves_the_bytes_that_it_states(pair):
    source, target = pair
    full = numbered(source)
    plan = plan_redistribution(source, target)
    run = Lockstep(plan)
    results = run.run(held_by_all(source, full))
    assert torch.equal(target.join(results), full), str(plan)
    for coords, result in zip(every_coords(source.sizes), results, strict=True):
        assert tuple(result.shape) == target.local_shape(coords), str(plan)
    assert run.bytes_sent == plan.total_bytes >= plan.lower_bound, str(plan)
    assert plan.rounds <= 2, str(plan)


@LAW
@given(layout_pairs())
def test_what_goes_there_and_back_is_the_same_bit_for_bit(pair):
    source, target = pair
    if source.pending_axes:
        return
    held = held_by_all(source, numbered(source))
    there = Lockstep(plan_redistribution(source, target)).run(held)
    back = Lockstep(plan_redistribution(target, source)).run(there)
    assert all(torch.equal(a, b) for a, b in zip(back, held, strict=True))


@LAW
@given(layout_pairs())
def test_without_terms_the_bytes_are_the_least_possible(pair):
    source, target = pair
    if source.pending_axes:
        return
    plan = plan_redistribution(source, target)
    assert plan.total_bytes == plan.lower_bound, str(plan)


@LAW
@given(layout_pairs(), st.floats(0, 1))
def test_in_pieces_the_value_and_the_bytes_are_the_same_and_the_memory_is_less(pair, share):
    source, target = pair
    full = numbered(source)
    whole = plan_redistribution(source, target)
    cap = int(share * whole.peak_bytes)
    try:
        plan = plan_redistribution(source, target, max_extra_bytes=cap)
    except PlanError:  # not even the smallest pieces fit
        return
    assert plan.peak_bytes <= cap
    run = Lockstep(plan)
    results = run.run(held_by_all(source, full))
    assert torch.equal(target.join(results), full), str(plan)
    assert run.bytes_sent == plan.total_bytes >= plan.lower_bound, str(plan)
    assert plan.rounds <= 2
