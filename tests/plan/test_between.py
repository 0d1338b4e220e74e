"""Plans between two meshes: right values, the fewest bytes, shared out evenly, in one round or two."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Box, Owner, Partial, Partition, Pending, Ragged, Region, Replicate, Shard
from shardwright.plan import decide_between, plan_redistribution
from shardwright.plan.bound_between import messages
from shardwright.plan.carry import Carry
from shardwright.plan.rank_map import Part
from tests.plan.kinds import all_kinds, small_integers
from tests.plan.lockstep import Lockstep, held_by_all
from tests.plan.two_meshes import fewest_messages, least_elements, least_for_terms, random_pairs, spread_terms

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
TRAINER = MeshShape(("dp",), (4,))
INFERENCE = MeshShape(("tp",), (3,), (3, 4, 5))


def on(mesh, *placements, shape=(8, 6), dtype=torch.float64) -> Layout:
    return Layout(mesh, placements, shape, dtype=dtype)


def check_run(source: Layout, target: Layout, plan, seed: int = 0) -> Lockstep:
    full = small_integers(source.shape, source.dtype, seed).sign() * 6
    world = Lockstep(plan)
    results = world.run(spread_terms(source, full))
    assert torch.equal(target.join(results), full), f"{plan}"
    for rank, result in zip(target.ranks, results, strict=True):
        assert tuple(result.shape) == target.local_shape(target.coords_of(rank)), f"{plan}"
    assert sum(world.received.values()) == plan.total_bytes, f"{plan}"
    assert plan.traffic == {rank: (world.sent[rank], world.received[rank]) for rank in plan.ranks}
    assert plan.max_bytes == max([*world.sent.values(), *world.received.values()])
    return world


def test_random_pairs_keep_the_value_and_move_what_the_plan_states():
    for seed, (source, target) in enumerate(random_pairs(400, seed=1)):
        if source.mesh_shape == target.mesh_shape:
            continue
        plan = plan_redistribution(source, target)
        check_run(source, target, plan, seed)
        assert plan.total_bytes >= plan.lower_bound, f"{plan}"
        assert plan.rounds <= 2, f"{plan}"
        if not source.pending_axes:
            assert plan.total_bytes == plan.lower_bound, f"{plan}"
            assert plan.rounds <= 1
        if not (source.pending_axes and target.pending_axes):
            assert plan.total_bytes == plan.lower_bound, f"{plan}"


def without_pending(ndim, n):
    return [p for p in all_kinds(ndim, n) if not p.is_pending]


def only_sums(ndim, n):
    return [P, *without_pending(ndim, n)]


def test_without_terms_the_bytes_are_those_that_a_count_of_every_element_finds():
    for source, target in random_pairs(150, seed=2, kinds=without_pending):
        if source.mesh_shape != target.mesh_shape:
            plan = plan_redistribution(source, target)
            assert plan.total_bytes == 8 * least_elements(source, target), f"{plan}"


def test_with_terms_no_sequence_of_messages_is_shorter():
    """All sequences of messages are tried, for every kind of element, in worlds of five ranks."""
    checked = 0
    small = ((1,), (2,), (3,), (2, 2))
    for source, target in random_pairs(200, seed=3, kinds=only_sums, sizes=small, world=5):
        terms = [source.sizes[axis] for axis in source.pending_axes]
        if source.mesh_shape == target.mesh_shape or not 1 < prod(terms) < 4 or target.pending_axes:
            continue
        plan = plan_redistribution(source, target)
        assert plan.total_bytes == 8 * least_for_terms(source, target), f"{plan}"
        checked += 1
    assert checked > 10


def test_the_bound_for_terms_that_become_terms_is_never_above_the_shortest_sequence():
    draw = random.Random(4)
    for _ in range(60):
        ranks = list(range(4))
        q, r = draw.choice([(2, 1), (3, 1), (2, 2), (4, 1)])
        held = draw.sample(ranks, q * r)
        size, count = draw.choice([(1, 2), (2, 1), (2, 2), (3, 1), (1, 4)])
        wanted = draw.sample(ranks, size * count)
        source = Part((), tuple(tuple(held[i * q : (i + 1) * q]) for i in range(r)))
        target = Part((), tuple(tuple(wanted[i * size : (i + 1) * size]) for i in range(count)))
        term_of = {rank: term for group in source.groups for term, rank in enumerate(group)}
        bound = messages(source, target, padded=True, by_term=False)
        assert bound == fewest_messages(term_of, target.groups, q)
        assert messages(source, target, padded=True, by_term=True) <= bound


class Diagonals(Partition):
    """Every n-th diagonal of a matrix: boxes of one element, the lower rows first."""

    def region(self, shape, n, coord):
        cells = [(i, j) for i in reversed(range(shape[0])) for j in range(shape[1]) if (i + j) % n == coord]
        return Region([Box(cell, (1, 1)) for cell in cells], (1, len(cells)))


@pytest.mark.parametrize("other", [S0, S1, R, P, Ragged((1, 2, 1), (0, 1)), Diagonals()])
def test_a_partition_of_the_user_goes_to_and_from_every_other(other):
    mine, theirs = on(TRAINER, Diagonals(), shape=(5, 4)), on(INFERENCE, other, shape=(5, 4))
    for source, target in ((mine, theirs), (theirs, mine)):
        plan = plan_redistribution(source, target)
        check_run(source, target, plan)
        assert plan.total_bytes == plan.lower_bound
        if other is not P:
            assert plan.lower_bound == 8 * least_elements(source, target)


# ------------------------------------------------------------------------------------------ in numbers


@pytest.mark.parametrize(
    ("source", "target", "elements", "rounds"),
    [
        (on(TRAINER, S0), on(INFERENCE, S0), 48, 1),
        (on(TRAINER, S0), on(INFERENCE, R), 12 * 2 + 36 + 3 * 24, 1),
        (on(TRAINER, R), on(INFERENCE, S1), 2 * 16, 1),
        (on(TRAINER, R), on(INFERENCE, P), 0, 0),
        (on(TRAINER, S0), on(INFERENCE, P), 36, 1),
        (on(TRAINER, P), on(INFERENCE, Owner(1)), 4 * 48, 1),
        (on(TRAINER, P), on(INFERENCE, R), (3 + 2) * 48, 2),
        (on(TRAINER, P), on(INFERENCE, P), 3 * 48, 1),
        (on(TRAINER, Partial("max")), on(INFERENCE, P), 3 * 48, 1),
        (on(TRAINER, P), on(MeshShape(("x", "y"), (2, 2)), P, S0), 2 * 48, 1),
        (on(TRAINER, P), on(MeshShape(("x",), (4,), (3, 2, 1, 0)), P), 0, 0),
        (on(TRAINER, S0), on(MeshShape(("x",), (4,)), S0), 0, 0),
        (on(TRAINER, S0), on(MeshShape(("x",), (4,), (1, 0, 2, 3)), S0), 24, 1),
        (on(TRAINER, S0), on(MeshShape(("x", "y"), (2, 2)), S0, S0), 0, 0),
    ],
)
def test_the_bytes_of_plans_that_can_be_counted_in_the_head(source, target, elements, rounds):
    plan = plan_redistribution(source, target)
    check_run(source, target, plan)
    assert (plan.total_bytes, plan.rounds) == (8 * elements, rounds), f"{plan}"


def test_holders_of_the_same_elements_send_equal_shares():
    shape = (256, 256)
    source = on(MeshShape(("r",), (4,)), R, shape=shape)
    for target in (on(MeshShape(("o",), (1,), (5,)), R, shape=shape), on(INFERENCE, S0, shape=shape)):
        plan = plan_redistribution(source, target)
        sent = [plan.traffic[rank][0] for rank in source.ranks]
        assert max(sent) - min(sent) <= 256 * 8  # a row
        check_run(source, target, plan)


def test_a_small_piece_is_not_cut_to_share_it_out():
    source, target = on(MeshShape(("r",), (2,)), R), on(MeshShape(("o",), (3,), (3, 4, 5)), S0)
    plan = plan_redistribution(source, target)
    shares = [plan.steps[0].work(rank).shares for rank in (0, 1)]
    assert sorted(sum(1 for share in of_rank if share.send) for of_rank in shares) == [1, 2]


def test_a_rank_that_stays_takes_its_own_elements_and_what_does_not_change_is_not_copied():
    source, target = on(TRAINER, S0), on(MeshShape(("x", "y"), (2, 2)), S0, S0)
    plan = plan_redistribution(source, target)
    held = held_by_all(source, small_integers(source.shape, source.dtype))
    assert all(a is b for a, b in zip(Lockstep(plan).run(held), held, strict=True))


def test_a_plan_is_cached_and_reads_well():
    source, target = on(TRAINER, P), on(INFERENCE, R)
    assert plan_redistribution(source, target) is plan_redistribution(source, target)
    plan = plan_redistribution(source, target)
    assert plan.reason.startswith("two rounds: the terms are combined at one rank per element")
    assert str(plan).splitlines() == [
        "f64[8, 6] {dp: Partial(sum)} -> f64[8, 6]",
        "  MeshShape(dp=4) of ranks 0, 1, 2, 3 -> MeshShape(tp=3) of ranks 3, 4, 5",
        "  1920 B in all (at least 1920 B), at most 1152 B on one rank, 2 rounds; " + plan.reason,
        "  1. the terms from 3 to 1 ranks, in messages between pairs",
        "  2. local: combine 4 terms of P(sum)",
        "  3. the missing elements from 1 to 2 ranks, in messages between pairs",
    ]


# ----------------------------------------------------------------------------------------- a cap on memory


def test_a_cap_on_memory_is_kept_with_the_same_bytes():
    capped = 0
    for seed, (source, target) in enumerate(random_pairs(60, seed=5)):
        if source.mesh_shape == target.mesh_shape:
            continue
        whole = plan_redistribution(source, target)
        try:
            plan = plan_redistribution(source, target, max_extra_bytes=whole.peak_bytes * 3 // 4)
        except PlanError:  # not even the smallest pieces fit
            continue
        assert plan.peak_bytes <= whole.peak_bytes * 3 // 4
        assert plan.total_bytes == whole.total_bytes
        check_run(source, target, plan, seed)
        capped += plan is not whole
    assert capped > 10


# ------------------------------------------------------------------------------------------------ refusals


class Noise(Pending):
    """A sum that cannot be made from a finished value."""

    can_be_target = False

    def combine(self, locals):  # noqa: A002
        return sum(locals[1:], locals[0])


class Longest(Pending):
    """A sum without a name: only its own terms know how it is combined, in their order."""

    def combine(self, locals):  # noqa: A002
        return sum(locals[1:], locals[0])

    def embed(self, x, n, coord):
        return x.clone() if coord == n - 1 else torch.zeros_like(x)


def refusal(source: Layout, target: Layout) -> str:
    with pytest.raises(PlanError) as caught:
        plan_redistribution(source, target)
    return str(caught.value)


def test_what_has_no_meaning_is_refused_in_one_clear_error():
    assert refusal(on(TRAINER, S0), on(INFERENCE, S0, shape=(8, 7))) == (
        "cannot redistribute f64[8@dp, 6] to f64[8@tp, 7]: shape is (8, 6) here and (8, 7) there; "
        "reshape or convert the tensor first"
    )
    assert refusal(on(TRAINER, S0), on(INFERENCE, S0, dtype=torch.float32)) == (
        "cannot redistribute f64[8@dp, 6] to f32[8@tp, 6]: "
        "dtype is torch.float64 here and torch.float32 there; reshape or convert the tensor first"
    )
    assert refusal(on(TRAINER, S0), on(INFERENCE, Noise())) == (
        "Noise() on axis 'tp' cannot be a target: it has no embed; redistribute to Replicate or a Partition "
        "instead"
    )
    assert refusal(on(TRAINER, S0, dtype=torch.int64), on(INFERENCE, Partial("avg"), dtype=torch.int64)) == (
        "Partial(avg) on axis 'tp' cannot be a target: it has no meaning for torch.int64; "
        'fix (checked): Replicate() or Partial("sum") or Partial("max") or Partial("bor")'
    )


@pytest.mark.parametrize("kind", [Noise(), Longest()])
def test_terms_that_users_defined_go_from_mesh_to_mesh_as_they_are(kind):
    mesh = MeshShape(("x",), (4,), (2, 3, 4, 5))
    source, target = on(TRAINER, kind), on(mesh, kind)
    plan = plan_redistribution(source, target)
    held = [torch.full((8, 6), float(i), dtype=torch.float64) for i in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(Lockstep(plan).run(held), held, strict=True))
    for other in (on(INFERENCE, R), on(INFERENCE, S1)):
        world = Lockstep(plan_redistribution(source, other))
        assert torch.equal(other.join(world.run(held)), torch.full((8, 6), 6.0, dtype=torch.float64))


def test_a_pending_without_an_identity_is_embedded_from_the_value():
    source, target = on(TRAINER, S0), on(INFERENCE, Longest())
    check_run(source, target, plan_redistribution(source, target))


# ---------------------------------------------------------------------------------- faults that are planted


@pytest.mark.parametrize("fault", ["_keeps", "_wants_in", "_term"])
def test_a_planted_fault_is_found(monkeypatch, fault):
    """What a rank holds is forgotten; what one rank wants is; terms arrive in each other's place."""
    mesh = MeshShape(("x",), (3,), (1, 2, 3))
    source, target = on(TRAINER, P), on(mesh, Ragged((1, 2, 1), (0,)))
    right = getattr(Carry, fault)
    wrong = {
        "_keeps": lambda *_: False,
        "_wants_in": lambda *arguments: right(*arguments)[:-1],
        "_term": lambda *_: 0,
    }
    monkeypatch.setattr(Carry, fault, wrong[fault])
    with pytest.raises(AssertionError):
        check_run(source, target, decide_between.DecisionBetween(source, target).plan())
