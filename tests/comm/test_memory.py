"""What ranks really hold while they redistribute is never more than the plan says, and the cap is kept."""

from __future__ import annotations

import random

import pytest
import torch

from shardwright.comm.execute import execute
from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.placement import (
    BlockCyclic,
    Interleaved,
    Owner,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    ZigZag,
)
from shardwright.plan import Plan, decide, plan_redistribution
from shardwright.plan.exchange import Exchange
from shardwright.plan.step import Holds
from shardwright.testing import rank_mesh
from tests.comm import live_bytes
from tests.comm.live_bytes import LiveBytes
from tests.tiers import all_but

AXES = ("a0", "a1")


def measured(plan: Plan, local: torch.Tensor, mesh) -> tuple[torch.Tensor, int]:
    """The result, and the most bytes held beside the local tensor; the tables of the plan are made before."""
    execute(plan, local, mesh)
    with LiveBytes(local, allowed=plan.peak_bytes) as live:
        result = execute(plan, local, mesh)
    return result, live.most


def kinds(n: int) -> list[Placement]:
    parts = [Shard(0), Shard(1), Interleaved(1, 2), ZigZag(0), BlockCyclic(0, 5), Owner(n - 1)]
    return [
        *parts,
        Ragged((*range(1, n), n + 2)),
        Ragged((1,) * n, (0, 1)),
        Replicate(),
        Partial(),
        Partial("max"),
    ]


def random_caps(sizes: tuple[int, ...], count: int, seed: int, small: int) -> tuple[int, int]:
    """Random pairs with random caps; how many were in pieces, and how many caps were refused."""
    decide.ONE_ROUND_BYTES = small
    decide._planned.cache_clear()
    decide._planned_in_pieces.cache_clear()
    mesh = rank_mesh(sizes, AXES[: len(sizes)])
    coords = tuple(mesh.get_coordinate())
    draw = random.Random(seed)
    in_pieces = refused = 0
    for _ in range(count):
        shape = draw.choice([(96, 40), (61, 33), (8, 300), (5, 3)])
        dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.int16])
        source, target = (
            Layout(
                mesh,
                [draw.choice(kinds(n)) for n in sizes],
                shape,
                dtype=dtype,
                order=draw.sample(AXES[: len(sizes)], len(sizes)),
            )
            for _ in range(2)
        )
        full = torch.arange(source.numel).remainder(97).to(dtype).view(shape)
        local = source.split(full, coords).clone()
        whole = plan_redistribution(source, target)
        result, most = measured(whole, local, mesh)
        assert most <= whole.peak_bytes, f"{most} B were held, {whole.peak_bytes} B were said:\n{whole}"
        cap = int(draw.uniform(0.2, 1.2) * whole.peak_bytes)
        try:
            plan = plan_redistribution(source, target, max_extra_bytes=cap)
        except PlanError as error:
            least = int(str(error).split("max_extra_bytes=")[1].split()[0])
            assert least > cap
            plan, cap = plan_redistribution(source, target, max_extra_bytes=least), least
            refused += 1
        again, most = measured(plan, local, mesh)
        assert most <= plan.peak_bytes <= cap, (
            f"{most} B were held, {plan.peak_bytes} B were said, {cap} B allowed:\n{plan}"
        )
        if not target.pending_axes:
            assert torch.equal(again, result), str(plan)
        in_pieces += "pieces" in plan.reason
    return in_pieces, refused


@pytest.mark.parametrize(
    ("sizes", "small"),
    all_but([((2, 3), 0), ((2, 3), 64 * 1024)], [((4,), 0), ((2, 3), 0), ((2, 3), 64 * 1024)]),
)
def test_the_cap_is_kept_on_real_ranks(ranks, sizes, small):
    results = ranks(4 if len(sizes) == 1 else 6, random_caps, sizes, 16, small + len(sizes), small)
    assert len(set(results)) == 1  # all ranks decided alike
    assert results[0][0] > 4
    assert results[0][1] > 0


def large() -> None:
    mesh = rank_mesh((4,), ("a0",))
    coords = tuple(mesh.get_coordinate())
    full = torch.arange(1024 * 1024.0).view(1024, 1024)
    for before, after in (
        (Shard(0), Shard(1)),
        (Shard(1), Replicate()),
        (Partial(), Shard(0)),
        (Partial(), Replicate()),
    ):
        source, target = (Layout(mesh, [p], full.shape, dtype=full.dtype) for p in (before, after))
        local = source.split(full, coords).clone()
        whole = plan_redistribution(source, target)
        cap = int((0.8 if before.is_partition else 1) * whole.peak_bytes)  # a sum has an all-reduce in place
        for plan in (whole, plan_redistribution(source, target, max_extra_bytes=cap)):
            result, most = measured(plan, local, mesh)
            assert most <= plan.peak_bytes, f"{most} B were held:\n{plan}"
            assert torch.equal(result, target.split(full, coords))


def test_large_tensors_need_no_more_than_is_said(ranks):
    ranks(4, large)


def lying() -> int:
    live_bytes.PATIENCE = 0.5
    Exchange.holds = lambda self, term, dtype: Holds(0 * self.target.counts, *[self.target.counts] * 2)
    random_caps((4,), 10, 0, 0)
    return 0


def test_a_plan_that_says_less_than_it_needs_is_found(ranks):
    with pytest.raises(Exception, match="B were held"):
        ranks(4, lying)
