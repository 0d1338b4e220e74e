"""Any redistribution as plans that cross one axis each: what a recorded or compiled program sends."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given

from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Partial, Shard
from shardwright.placement.made_by_views.flat import Flat
from shardwright.plan import plan_redistribution
from shardwright.plan.by_axis import plans_by_axis
from tests.generators import LAW, numbered
from tests.plan.lockstep import Lockstep, held_by_all
from tests.plan.test_redistribution_laws import layout_pairs


@LAW
@given(layout_pairs())
def test_every_redistribution_is_a_chain_of_plans_of_one_axis(pair):
    source, target = pair
    full = numbered(source)
    plans = plans_by_axis(plan_redistribution(source, target))
    assert not any(plan.crosses_several_axes for plan in plans)
    assert all(one.target == other.source for one, other in pairwise(plans))
    held = held_by_all(source, full)
    for plan in plans:
        held = Lockstep(plan).run(held)
    assert torch.equal(target.join(held), full)


def test_what_cuts_the_parts_of_a_crossed_axis_is_gathered_before_it():
    mesh = MeshShape(("dp", "cp", "tp"), (2, 2, 2))
    source = Layout(
        mesh,
        (Shard(0), Flat((0, 1, 2), Shard(0)), Shard(2)),
        (1, 1, 5),
        dtype=torch.float64,
        order=("tp", "cp", "dp"),
    )
    target = Layout(mesh, (Partial("sum"), Shard(0), Shard(0)), (1, 1, 5), dtype=torch.float64)
    plans = plans_by_axis(plan_redistribution(source, target))
    assert not any(plan.crosses_several_axes for plan in plans)
    held = held_by_all(source, numbered(source))
    for plan in plans:
        held = Lockstep(plan).run(held)
    assert torch.equal(target.join(held), numbered(source))
