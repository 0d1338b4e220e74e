"""What ranks really hold while a tensor goes to another mesh is never more than the plan says."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.comm.execute import execute
from shardwright.errors import PlanError
from shardwright.plan import Plan, plan_redistribution
from shardwright.plan.carry import Carry
from shardwright.plan.step import Holds, most_held
from tests.comm import live_bytes
from tests.comm.live_bytes import LiveBytes
from tests.plan.lockstep import held_by_all
from tests.plan.two_meshes import random_pairs

SHAPES = ((96, 40), (61, 33), (8, 300), (5, 3))


def check_memory(plan: Plan, local: torch.Tensor, allowed: int) -> None:
    execute(plan, local, None)  # makes the plan's tables
    rank = dist.get_rank()
    most, _ = most_held(plan.steps, local.dtype)
    of_rank = dict(zip(plan.ranks, np.broadcast_to(most, len(plan.ranks)).tolist(), strict=True))
    said = of_rank.get(rank, 0) * local.element_size()
    with LiveBytes(local, allowed=said) as live:
        execute(plan, local, None)
    assert live.most <= said <= plan.peak_bytes <= allowed, f"{live.most} B were held, {said} B said: {plan}"


def random_caps(count: int) -> int:
    """Random pairs, each whole and with a random cap; how many were in pieces."""
    draw, in_pieces, rank = random.Random(5), 0, dist.get_rank()
    for source, target in random_pairs(count, seed=11, shapes=SHAPES):
        parts = dict(zip(source.ranks, held_by_all(source, torch.ones(source.shape).double()), strict=True))
        local = parts.get(rank, torch.empty(0).double())
        whole = plan_redistribution(source, target)
        check_memory(whole, local, whole.peak_bytes)
        cap = int(draw.uniform(0.2, 1) * whole.peak_bytes)
        try:
            plan = plan_redistribution(source, target, max_extra_bytes=cap)
        except PlanError as error:
            cap = int(str(error).split("max_extra_bytes=")[1].split()[0])
            plan = plan_redistribution(source, target, max_extra_bytes=cap)
        check_memory(plan, local, cap)
        in_pieces += "pieces" in plan.reason
    return in_pieces


@pytest.mark.parametrize(("count", "least"), [(5, 1), pytest.param(16, 5, marks=pytest.mark.slow)])
def test_a_cap_on_memory_is_kept_between_meshes(ranks, count, least):
    counts = ranks(6, random_caps, count)
    assert len(set(counts)) == 1
    assert counts[0] >= least


def lying() -> None:
    live_bytes.PATIENCE = 0.5
    Carry.holds = lambda self, term, dtype: Holds(*[self.target.counts] * 3)
    random_caps(8)


def test_a_plan_that_says_less_than_it_needs_is_found(ranks):
    with pytest.raises(Exception, match="B were held"):
        ranks(6, lying)
