"""Every plan gives the right values, moves what it says, and is as near to the least as the laws ask."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.placement import Box, Interleaved, Partial, Partition, Pending, Region, Replicate, Shard
from shardwright.plan import decide, exchange, plan_redistribution
from shardwright.plan.exchange import Exchange
from shardwright.plan.holders import every_coords
from shardwright.plan.steps import AllReduce, Combine, LocalMove
from tests.plan.kinds import MESHES, mesh_shape, random_pairs, small_integers
from tests.plan.lockstep import Lockstep, scattered_terms

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.fixture
def fresh_plans():
    """No plan made before or inside the test is met by another."""
    decide._planned.cache_clear()
    yield
    decide._planned.cache_clear()


def layout(sizes, placements, shape=(8, 6), dtype=torch.float32, **kwargs) -> Layout:
    return Layout(mesh_shape(sizes), placements, shape, dtype=dtype, **kwargs)


def run_and_check(source: Layout, target: Layout, full: torch.Tensor) -> float:
    """Run one plan on all ranks; its bytes over the lower bound (1.0 when both are 0)."""
    plan = plan_redistribution(source, target)
    run = Lockstep(plan)
    results = run.run(scattered_terms(source, full))
    assert torch.equal(target.join(results), full), str(plan)
    for coords, result in zip(every_coords(source.sizes), results, strict=True):
        assert tuple(result.shape) == target.local_shape(coords), str(plan)
    assert run.bytes_sent == plan.total_bytes >= plan.lower_bound, str(plan)
    assert plan.rounds <= 2, str(plan)
    return plan.total_bytes / plan.lower_bound if plan.lower_bound else 1.0 + plan.total_bytes


@pytest.mark.parametrize("sizes", [*MESHES, (2, 2, 2), (1, 3), (5,)])
def test_random_pairs_of_all_placements_orders_and_strides_keep_every_value(sizes):
    for seed, (source, target) in enumerate(random_pairs(sizes, 60, seed=len(sizes))):
        values = small_integers(source.shape, source.dtype, seed)
        if {"avg", "product"} & {
            getattr(p, "reduce_op", "") for p in (*source.placements, *target.placements)
        }:
            values = values.sign() * 6  # divisible by the sizes, and products stay small
        run_and_check(source, target, values)


def test_the_bytes_per_rank_are_those_of_the_messages():
    plan = plan_redistribution(layout((4,), [S0]), layout((4,), [S1]))
    assert (plan.total_bytes, plan.max_bytes) == (36 * 4, 12 * 4)
    owner_side = plan_redistribution(layout((4,), [S0], (5,)), layout((4,), [R], (5,)))
    assert owner_side.max_bytes == 6 * 4  # the first rank sends its 2 elements to 3 others


def test_a_pending_becomes_a_part_with_the_bytes_of_a_reduce_scatter():
    plan = plan_redistribution(layout((4,), [P], (64, 64)), layout((4,), [S0], (64, 64)))
    assert plan.total_bytes == plan.lower_bound == 3 * 64 * 64 * 4
    assert not any(isinstance(step, AllReduce) for step in plan.steps)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([R], [S0]),
        ([R], [P]),
        ([S0], [P]),
        ([S0], [S0]),
        ([Interleaved(0, 1)], [S0]),
        ([R], [Partial("avg")]),
    ],
)
def test_what_a_rank_holds_already_is_not_sent(source, target):
    plan = plan_redistribution(layout((4,), source), layout((4,), target))
    assert (plan.total_bytes, plan.lower_bound, plan.rounds) == (0, 0, 0)


def test_one_exchange_crosses_only_the_axes_that_change():
    plan = plan_redistribution(layout((2, 2), [S0, S1]), layout((2, 2), [S0, R]))
    assert [step.axes for step in plan.steps if isinstance(step, Exchange)] == [(1,)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([Partial("max"), P], [R, R]),
        ([P, Partial("max")], [R, Partial("max")]),
        ([P, Partial("max")], [P, R]),
        ([Partial("max"), P], [S0, S1]),
        ([S0, Partial("max")], [P, R]),
        ([R, S0], [Partial("product"), P]),
    ],
)
@pytest.mark.parametrize("order", [("a0", "a1"), ("a1", "a0")])
def test_several_pendings_combine_right_to_left(before, after, order):
    source = layout((2, 3), before, order=order)
    target = layout((2, 3), after)
    terms = [
        small_integers(source.local_shape(c), source.dtype, i) for i, c in enumerate(every_coords((2, 3)))
    ]
    meaning = source.join(terms)
    results = Lockstep(plan_redistribution(source, target)).run(terms)
    assert torch.equal(target.join(results), meaning)


def test_pendings_that_are_swapped_are_noticed(monkeypatch, fresh_plans):
    from shardwright.plan import pending

    monkeypatch.setattr(pending, "commute", lambda pendings: True)
    source, target = layout((2, 3), [P, Partial("max")]), layout((2, 3), [R, Partial("max")])
    terms = [small_integers((8, 6), torch.float32, i) for i in range(6)]
    swapped = Lockstep(plan_redistribution(source, target)).run(terms)
    assert not torch.equal(target.join(swapped), source.join(terms))


def test_elements_taken_from_the_wrong_place_are_noticed(monkeypatch):
    right = exchange.stretches
    monkeypatch.setattr(exchange, "stretches", lambda found: right([(0, to, size) for _, to, size in found]))
    with pytest.raises(AssertionError):
        run_and_check(
            layout((4,), [S0], (16, 4)), layout((4,), [S1], (16, 4)), torch.arange(64.0).view(16, 4)
        )


def test_bytes_that_are_not_those_of_the_messages_are_noticed(monkeypatch, fresh_plans):
    monkeypatch.setattr(exchange, "matching", lambda source, target: 1)
    with pytest.raises(AssertionError):
        run_and_check(layout((4,), [S0], (16, 8)), layout((4,), [S1], (16, 8)), torch.ones(16, 8))


def test_a_plan_is_made_once():
    pair = layout((2, 2), [S0, R]), layout((2, 2), [R, S1])
    assert plan_redistribution(*pair) is plan_redistribution(*pair)


def test_the_text_of_a_plan_says_bytes_rounds_and_steps():
    text = str(plan_redistribution(layout((4,), [S0]), layout((4,), [S1])))
    assert text.splitlines()[0] == "f32[8@a0, 6] -> f32[8, 6@a0]"
    assert "144 B in all (at least 144 B), at most 48 B on one rank, 1 round" in text
    assert "exchange of the missing elements over a0" in text


class Median(Pending):
    """A reduction that cannot be a target."""

    can_be_target = False

    def combine(self, locals):  # noqa: A002
        return torch.stack(list(locals)).median(dim=0).values


def test_a_pending_of_the_user_is_gathered_and_combined():
    source, target = layout((3,), [Median()]), layout((3,), [R])
    terms = [small_integers((8, 6), torch.float32, i) for i in range(3)]
    results = Lockstep(plan_redistribution(source, target)).run(terms)
    assert all(torch.equal(result, torch.stack(terms).median(dim=0).values) for result in results)


class ChessTiles(Partition):
    """Every n-th diagonal: boxes of one element, the lower rows first."""

    def region(self, shape, n, coord):
        cells = [(i, j) for i in reversed(range(shape[0])) for j in range(shape[1]) if (i + j) % n == coord]
        return Region([Box(cell, (1, 1)) for cell in cells], (1, len(cells)))


class Halved(Pending):
    """Half of the sum of the terms."""

    def combine(self, locals):  # noqa: A002
        return sum(locals) / 2

    def embed(self, x, n, coord):
        return x * 2 if coord == 0 else torch.zeros_like(x)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "product", "norm2"])
def test_one_term_is_finished_as_it_is(op):
    source = layout((1,), [Partial(op)])
    plan = plan_redistribution(source, layout((1,), [R]))
    assert [type(step) for step in plan.steps] == [LocalMove]
    mixed = plan_redistribution(layout((1, 4), [Partial(op), S0]), layout((1, 4), [R, R]))
    assert not any(isinstance(step, Combine) for step in mixed.steps)
    values = torch.tensor([-0.0, -2.0, 0.0, 3.0, float("inf"), -1.5]).expand(8, 6)
    (found,) = Lockstep(plan).run([values])
    assert torch.equal(found.view(torch.int32), values.contiguous().view(torch.int32))
    run_and_check(layout((1,), [Halved()]), layout((1,), [R]), values)


@pytest.mark.parametrize("order", [("a0", "a1"), ("a1", "a0")])
def test_a_partition_of_the_user_goes_to_and_from_every_other(order):
    board = layout((2, 3), [R, ChessTiles()], (5, 4))
    full = small_integers((5, 4), torch.float32)
    for placements in ([S0, S1], [R, R], [P, S0], [S1, R], [Interleaved(0, 2), P], [S0, S0]):
        other = layout((2, 3), placements, (5, 4), order=order)
        run_and_check(board, other, full)
        run_and_check(other, board, full)


def test_what_cannot_be_done_is_refused_with_the_reason():
    with pytest.raises(PlanError, match=r"cannot be a target"):
        plan_redistribution(layout((3,), [R]), layout((3,), [Median()]))
    with pytest.raises(PlanError, match=r"shape is \(8, 6\) here and \(8, 7\) there"):
        plan_redistribution(layout((3,), [R]), layout((3,), [R], (8, 7)))
    with pytest.raises(PlanError, match=r"dtype is"):
        plan_redistribution(layout((3,), [R]), layout((3,), [R], dtype=torch.int32))
    with pytest.raises(PlanError, match=r"in 8 pieces .* pass max_extra_bytes=320 or more"):
        plan_redistribution(layout((4,), [S0]), layout((4,), [R]), max_extra_bytes=10)
