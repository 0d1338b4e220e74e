"""With slow axes stated, as little as possible crosses them, and no more in all."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.placement import Interleaved, Partial, Replicate, Shard
from shardwright.plan import Plan, network, plan_redistribution
from shardwright.plan.network import Network, set_network
from tests.plan.all_pairs import _seen
from tests.plan.kinds import mesh_shape, random_pairs, small_integers
from tests.plan.lockstep import Lockstep, scattered_terms

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.fixture
def slow():
    """Axis a0 is slow, and no message is small."""
    before = network.current
    set_network(Network(slow_axes=("a0",), one_round_bytes=0))
    yield
    set_network(before)


def made(sizes, before, after, shape=(8, 6), dtype=torch.float32) -> Plan:
    source, target = (Layout(mesh_shape(sizes), p, shape, dtype=dtype) for p in (before, after))
    return plan_redistribution(source, target)


@pytest.mark.parametrize(
    ("before", "after", "rounds"),
    [
        ([S0, S0], [R, R], 2),
        ([S0, S1], [R, R], 2),
        ([P, P], [S0, S0], 2),
        ([P, P], [S0, S1], 2),
        ([P, P], [R, R], 4),
        ([S0, S0], [S1, S1], 1),
        ([R, S0], [R, R], 1),
        ([S0, R], [R, R], 1),
    ],
)
def test_gathers_take_the_slow_axis_first_and_reductions_last(slow, before, after, rounds):
    for sizes in ((2, 4), (3, 2)):
        plan = made(sizes, before, after)
        assert plan.rounds == rounds, str(plan)
        assert plan.total_bytes == plan.lower_bound, str(plan)
        if before != [S0, R]:  # every rank of a node fetches for itself: sharing would move more in all
            assert plan.slow_bytes == plan.slow_bound, str(plan)
        full = small_integers((8, 6), torch.float32)
        run = Lockstep(plan)
        results = run.run(scattered_terms(plan.source, full))
        assert torch.equal(plan.target.join(results), full), str(plan)
        assert run.bytes_sent == plan.total_bytes


def test_without_slow_axes_more_crosses_them():
    plan = made((2, 4), [S0, S0], [R, R], (1024, 1024))
    assert (plan.rounds, plan.slow) == (1, frozenset())
    before = network.current
    set_network(Network(slow_axes=("a0",)))
    two = made((2, 4), [S0, S0], [R, R], (1024, 1024))
    set_network(before)
    direct = sum(step.crossing(frozenset({0})) for step in plan.steps) * 4
    assert direct == 4 * two.slow_bytes == 4 * two.slow_bound
    assert two.total_bytes == plan.total_bytes
    assert "B over the slow a0 (at least" in str(two)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (2, 2, 2)])
def test_random_pairs_keep_their_values_and_the_slow_bound_is_one(slow, sizes):
    for seed, (source, target) in enumerate(random_pairs(sizes, 50, seed=11)):
        if {"avg", "product"} & {
            getattr(p, "reduce_op", "") for p in (*source.placements, *target.placements)
        }:
            continue
        plan = plan_redistribution(source, target)
        full = small_integers(source.shape, source.dtype, seed)
        run = Lockstep(plan)
        assert torch.equal(target.join(run.run(scattered_terms(source, full))), full), str(plan)
        assert run.bytes_sent == plan.total_bytes >= plan.lower_bound, str(plan)
        assert plan.slow_bytes >= plan.slow_bound or not source.numel, str(plan)


def test_the_slow_bound_is_a_count_of_elements_per_node(slow):
    kinds = [R, S0, S1, Interleaved(0, 2)]
    mesh, shape = mesh_shape((2, 2)), (7, 3)
    for before, after in itertools.product(itertools.product(kinds, repeat=2), repeat=2):
        source, target = (Layout(mesh, p, shape, dtype=torch.float32) for p in (before, after))
        has, wants = _seen(source), _seen(target)
        nodes = (0b0011, 0b1100)
        count = sum(int((((wants & node) > 0) & ((has & node) == 0)).sum()) for node in nodes)
        assert plan_redistribution(source, target).slow_bound == 4 * count


def test_a_network_is_read_from_text_and_a_wrong_one_is_refused():
    network = Network(slow_axes=("dp",), one_round_bytes=1000)
    assert Network.from_json(network.to_json()) == network
    for text in ("{", "[]", '{"slow": 1}', '{"one_round_bytes": "x"}'):
        with pytest.raises(PlanError, match=r"network|slow_axes"):
            Network.from_json(text)
