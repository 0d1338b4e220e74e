"""A step of a new kind is one class: plans count it, and the executor runs it, without a word about it."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwright.comm import Recorder, mailbox
from shardwright.comm.async_result import Later
from shardwright.comm.execute import execute, execute_later, execute_many
from shardwright.index.overlap import Strided
from shardwright.layout.layout import Layout
from shardwright.placement import Shard
from shardwright.plan import Plan
from shardwright.plan.holders import LayoutMap
from shardwright.plan.step import Holds, Step
from shardwright.plan.work import Apply, Move, Share, Transfer
from shardwright.testing import rank_mesh
from tests.comm.live_bytes import LiveBytes
from tests.plan.kinds import mesh_shape
from tests.plan.lockstep import Lockstep, held_by_all


@dataclass(frozen=True, eq=False)
class Reverse(Step):
    """What every rank holds, along dim 0 from last to first."""

    map: LayoutMap

    def describe(self, axes):
        return "local: turn the rows around"

    def work(self, seat):
        return Apply(lambda held: held.flip(0))

    def holds(self, term, dtype):
        return Holds(*[self.map.counts] * 3)


@dataclass(frozen=True, eq=False)
class Swap(Step):
    """Neighbours on an axis give each other the first half of what they hold."""

    map: LayoutMap
    axis: int
    in_group: bool

    rounds = 1

    @property
    def axes(self):
        return (self.axis,) if self.in_group else ()

    @property
    def moved(self):
        return self.map.elements // 2

    def describe(self, axes):
        return f"neighbours on {axes[self.axis]} swap halves"

    def work(self, seat):
        memory = self.map.memory(seat)
        half = memory.numel // 2
        first, second = (Strided((half,), (1,), start) for start in (0, half))
        neighbour = tuple(c ^ 1 if a == self.axis else c for a, c in enumerate(seat))
        return Transfer(
            kept=Move(memory, memory, ((second, second),)),
            own=seat,
            shares=(Share(neighbour, (first,), (first,)),),
            axes=self.axes,
            moved=self.moved,
        )

    def traffic(self):
        return self.map.counts // 2, self.map.counts // 2

    def holds(self, term, dtype):
        made = self.map.counts
        return Holds(2 * made, made, made, late=made)


def plan_of(rows: int, *, in_group: bool, mesh=None) -> Plan:
    layout = Layout(mesh or mesh_shape((4,)), [Shard(0)], (4 * rows, 3), dtype=torch.float32)
    held = LayoutMap(layout)
    return Plan(layout, layout, (Swap(held, 0, in_group), Reverse(held)), "to see what happens", 0)


def full_of(rows: int) -> torch.Tensor:
    return torch.arange(12.0 * rows).view(4 * rows, 3)


def expected(rows: int) -> list[torch.Tensor]:
    parts, half = full_of(rows).split(rows), rows // 2
    return [torch.cat([parts[i ^ 1][:half], parts[i][half:]]).flip(0) for i in range(4)]


def test_a_plan_counts_it():
    plan = plan_of(2, in_group=True)
    assert (plan.rounds, plan.total_bytes, plan.max_bytes) == (1, 4 * 3 * 4, 3 * 4)
    assert plan.traffic == dict.fromkeys(range(4), (12, 12))
    assert plan.peak_bytes == 3 * 6 * 4  # the result of the swap, the reversed one, and buffers under way
    assert str(plan).splitlines() == [
        "f32[8@a0, 3] -> f32[8@a0, 3]",
        "  48 B in all (at least 0 B), at most 12 B on one rank, 1 round; to see what happens",
        "  1. neighbours on a0 swap halves",
        "  2. local: turn the rows around",
    ]


def test_all_ranks_in_one_process_run_it():
    plan = plan_of(2, in_group=True)
    run = Lockstep(plan)
    results = run.run(held_by_all(plan.source, full_of(2)))
    assert all(torch.equal(a, b) for a, b in zip(results, expected(2), strict=True))
    assert run.bytes_sent == plan.total_bytes


def on_ranks(in_group: bool, singly: bool) -> tuple[list[str], int, int]:
    """The ranks go on to other tests: what is posted there is posted as ever."""
    with mock.patch.object(mailbox, "_posts_singly", return_value=singly):
        return _on_ranks(in_group)


def _on_ranks(in_group: bool) -> tuple[list[str], int, int]:
    mesh, rank = rank_mesh((4,), ("a0",)), dist.get_rank()
    plan = plan_of(64, in_group=in_group, mesh=mesh)
    local = full_of(64).split(64)[rank].clone()
    with Recorder() as seen:
        result = execute(plan, local, mesh)
    with LiveBytes(local, allowed=plan.peak_bytes) as live:
        execute(plan, local, mesh)
    assert live.most <= plan.peak_bytes
    later = execute_later(plan, local, mesh)
    assert isinstance(later, Later)
    local.zero_()  # what it sends was taken
    dist.barrier()
    for x in (result, later.wait()):
        assert torch.equal(x, expected(64)[rank])
    return [event.op for event in seen.collectives], seen.bytes, plan.total_bytes


@pytest.mark.parametrize(
    ("in_group", "singly", "op"),
    [(True, True, "all_to_all"), (False, True, "send_recv"), (False, False, "send_recv")],
)
def test_ranks_run_it_and_send_what_the_plan_says(ranks, in_group, singly, op):
    """As a collective of the axis, as messages one by one, as one batch of messages."""
    seen = ranks(4, on_ranks, in_group, singly)
    assert [ops for ops, _, _ in seen] == [[op]] * 4
    assert sum(sent for _, sent, _ in seen) == seen[0][2]


def many_on_ranks(in_group: bool) -> int:
    mesh, rank = rank_mesh((4,), ("a0",)), dist.get_rank()
    heights = (2, 6, 4)
    plans = [plan_of(rows, in_group=in_group, mesh=mesh) for rows in heights]
    with Recorder() as seen:
        results = execute_many(plans, [full_of(rows).split(rows)[rank] for rows in heights], mesh)
    for rows, result in zip(heights, results, strict=True):
        assert torch.equal(result, expected(rows)[rank])
    assert seen.bytes == sum(plan.traffic[rank][0] for plan in plans)
    return len(seen.collectives)


@pytest.mark.parametrize("in_group", [True, False])
def test_several_tensors_share_what_it_sends(ranks, in_group):
    assert ranks(4, many_on_ranks, in_group) == [1] * 4
