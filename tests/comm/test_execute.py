"""Plans on real ranks give what the layouts say, send what the plan says, and can be traced and packed."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from functools import partial
from math import prod
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.comm import Recorder, mailbox, pack, program
from shardwright.comm.execute import execute, execute_many
from shardwright.comm.guard import guarded
from shardwright.errors import PlanError
from shardwright.index.overlap import Strided
from shardwright.layout.layout import Layout
from shardwright.placement import Owner, Partial, Ragged, Replicate, Shard, ZigZag
from shardwright.plan import decide, plan_redistribution
from shardwright.plan.work import Memory
from shardwright.testing import rank_mesh
from tests.plan.kinds import random_pairs, small_integers

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def mesh_of(sizes):
    return rank_mesh(sizes, tuple(f"a{i}" for i in range(len(sizes))))


def bytes_of_all(seen) -> int:
    total = torch.tensor(seen.bytes)
    dist.all_reduce(total)
    return int(total)


@contextmanager
def thresholds(one_round, straight):
    """Plans of a block are made and run as if these were the sizes from which on it pays to do otherwise."""
    decide._planned.cache_clear()
    with (
        mock.patch.object(decide, "ONE_ROUND_BYTES", one_round),
        mock.patch.object(program, "STRAIGHT_BYTES", straight),
        mock.patch.object(program, "STRAIGHT_BYTES_UNREPEATED", straight),
    ):
        yield
    decide._planned.cache_clear()


def random_redistributions(sizes, count, one_round, straight, singly):
    with thresholds(one_round, straight), mock.patch.object(mailbox, "_posts_singly", return_value=singly):
        redistribute_at_random(sizes, count, seed=one_round + straight)


def redistribute_at_random(sizes, count, seed):
    mesh = mesh_of(sizes)
    coords = tuple(mesh.get_coordinate())
    for draw, (source, target) in enumerate(random_pairs(sizes, count, seed=seed)):
        full = small_integers(source.shape, source.dtype, draw).sign() * 6
        plan = plan_redistribution(source, target)
        with Recorder() as seen:
            result = execute(plan, source.split(full, coords), mesh)
        assert tuple(result.shape) == target.local_shape(coords), str(plan)
        if not target.pending_axes:
            assert torch.equal(result, target.split(full, coords)), str(plan)
        whole = plan_redistribution(target, target.with_placements([R] * len(sizes)))
        assert torch.equal(execute(whole, result, mesh), full), str(plan)
        if all(event.op != "all_reduce" for event in seen.collectives):
            assert bytes_of_all(seen) == plan.total_bytes, str(plan)


@pytest.mark.parametrize(("one_round", "straight"), [(0, 0), (65536, 2**40)])
@pytest.mark.parametrize("sizes", [(4,), (2, 2), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_random_redistributions_on_real_ranks(ranks, sizes, one_round, straight):
    ranks(prod(sizes), random_redistributions, sizes, 25, one_round, straight, singly=True)


def test_messages_may_be_posted_as_one_batch(ranks):
    ranks(4, random_redistributions, (2, 2), 25, 0, 0, singly=False)


def dtypes_travel():
    mesh = mesh_of((2, 2))
    coords = tuple(mesh.get_coordinate())
    for dtype in (torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64):
        full = torch.arange(42).remainder(5).to(dtype).view(7, 6)
        for before, after in (((S0, S1), (S1, S0)), ((S0, R), (R, R)), ((ZigZag(0), Owner(1)), (R, S1))):
            source, target = (Layout(mesh, p, (7, 6), dtype=dtype) for p in (before, after))
            result = execute(plan_redistribution(source, target), source.split(full, coords), mesh)
            assert torch.equal(
                result.view(torch.uint8), target.split(full, coords).contiguous().view(torch.uint8)
            )


def test_every_dtype_travels_bit_for_bit(ranks):
    ranks(4, dtypes_travel)


def large_reduction(sizes):
    mesh = mesh_of(sizes)
    layout = Layout(mesh, [P] * len(sizes), (300, 401), dtype=torch.float32)
    target = layout.with_placements([R] * len(sizes))
    plan = plan_redistribution(layout, target)
    local = torch.full((300, 401), float(dist.get_rank() + 1))
    with Recorder() as seen:
        result = execute(plan, local, mesh)
    n = dist.get_world_size()
    assert torch.equal(result, torch.full((300, 401), n * (n + 1) / 2))
    return [event.op for event in seen.collectives], plan.total_bytes / plan.lower_bound


def test_a_large_sum_takes_the_fewest_bytes_that_one_or_two_rounds_allow(ranks):
    assert ranks(2, large_reduction, (2,))[0] == (["all_reduce"], 1.0)
    assert ranks(4, large_reduction, (4,))[0] == (["all_reduce"], 1.0)
    assert ranks(4, large_reduction, (2, 2))[0] == (["send_recv", "send_recv"], 1.0)


def packed():
    mesh = mesh_of((2, 2))
    coords = tuple(mesh.get_coordinate())
    full = [small_integers((4 + 2 * i, 4), torch.float32, i) for i in range(10)]
    full += [small_integers((4, 4), torch.float64, i) for i in range(3)]
    for before, after in (
        ((S0, R), (R, R)),
        ((S0, S1), (S1, S0)),
        ((P, R), (S0, R)),
        ((P, P), (R, R)),
        ((R, P), (R, R)),
    ):
        sources = [Layout(mesh, before, x.shape, dtype=x.dtype) for x in full]
        targets = [Layout(mesh, after, x.shape, dtype=x.dtype) for x in full]
        plans = [plan_redistribution(a, b) for a, b in zip(sources, targets, strict=True)]
        held = [layout.split(x, coords) for layout, x in zip(sources, full, strict=True)]
        with Recorder() as seen:
            results = execute_many(plans, held, mesh)
        assert len({(plan.form, plan.source.dtype) for plan in plans}) == 2
        mine = {(plan.form, plan.source.dtype) for plan in plans if any(plan.traffic[dist.get_rank()])}
        assert len(seen.collectives) == len(mine)
        for result, layout, x in zip(results, targets, full, strict=True):
            assert torch.equal(result, layout.split(x, coords))


def test_many_tensors_share_one_collective_per_form_and_dtype(ranks):
    ranks(4, packed)


def traced(sizes):
    mesh = mesh_of(sizes)
    coords = tuple(mesh.get_coordinate())
    full = torch.arange(42.0).view(7, 6)
    kinds = [(S0,), (S1,), (P,), (R,)] if len(sizes) == 1 else [(S0, S1), (S1, S0), (P, S0), (R, R), (S0, S0)]
    for before, after in itertools.permutations(kinds, 2):
        source, target = (Layout(mesh, p, (7, 6), dtype=torch.float32) for p in (before, after))
        plan = plan_redistribution(source, target)
        x = source.split(full, coords).clone()
        graph = make_fx(partial(execute, plan, mesh=mesh), tracing_mode="fake")(x)
        assert torch.equal(graph(x), execute(plan, x, mesh)), str(plan)


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_plans_can_be_traced_into_a_graph(ranks, sizes):
    ranks(4 if len(sizes) == 2 else 2, traced, sizes)


def _boxes(cuts, stride):
    """The strided views that cuts of each dim make, the last first."""
    ends = [list(itertools.pairwise(itertools.accumulate(of_dim, initial=0))) for of_dim in cuts]
    for box in itertools.product(*(reversed(of_dim) for of_dim in ends)):
        starts = [start * step for (start, _), step in zip(box, stride, strict=True)]
        yield Strided(tuple(stop - start for start, stop in box), stride, sum(starts))


@pytest.mark.parametrize("rows", [1 << 16, 8])
def test_what_a_graph_chooses_is_what_is_copied_view_by_view(monkeypatch, rows):
    """Rows of several widths, of all of a tensor and of a part, and more of them than a constant has."""
    monkeypatch.setattr(pack, "_MOST_ROWS", rows)
    x, memory, chosen = torch.randn(6, 6, 8), Memory((6, 6, 8), (48, 8, 1)), 0
    for cuts in itertools.product([(2, 4), (1, 3, 2)], [(4, 2), (6,)], [(8,), (2, 6), (5, 3)]):
        views = list(_boxes(cuts, memory.stride))
        gaps = torch.randn(6, 6, 9)[..., :8]
        between = list(_boxes(cuts, gaps.stride()))
        flat, written, of_gaps = pack.joined(x, views), torch.empty(6, 6, 8), pack.joined(gaps, between)
        pack.copy_in(flat, written, views)
        assert torch.equal(written, x)
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            assert torch.equal(pack.joined(x, views), flat)
            assert torch.equal(pack.joined(gaps, between), of_gaps)
            assert torch.equal(pack.joined(x, views[1:]), flat[views[0].numel :])
            some = views[:3]
            assert pack.arranged(x, (), memory, [flat], views[1:]) is None, "a part of it is not written"
            made = pack.arranged(x, (), memory, [flat], views)
            rest = flat[sum(view.numel for view in some) :]
            both = pack.arranged(x, [*zip(some, some, strict=True)], memory, [rest], views[3:])
        assert (made is None) == (both is None)
        assert made is None or (torch.equal(made, x) and torch.equal(both, x))
        chosen += made is not None
    assert (chosen > 8) == (rows > 8)


def in_pieces():
    mesh = mesh_of((2, 2))
    coords = tuple(mesh.get_coordinate())
    full = small_integers((64, 32), torch.float32)
    for before, after in (((S0, S1), (S1, S0)), ((S0, S0), (R, R)), ((P, S0), (S1, R)), ((P, P), (R, R))):
        source, target = (Layout(mesh, p, full.shape, dtype=full.dtype) for p in (before, after))
        whole = plan_redistribution(source, target)
        plan = plan_redistribution(source, target, max_extra_bytes=whole.peak_bytes * 3 // 4)
        assert plan.peak_bytes <= whole.peak_bytes * 3 // 4
        with Recorder() as seen:
            result = execute(plan, source.split(full, coords), mesh)
        assert torch.equal(result, target.split(full, coords))
        assert bytes_of_all(seen) == plan.total_bytes
        assert "pieces to save memory" in plan.reason


def test_a_cap_on_memory_runs_the_plan_in_pieces(ranks):
    ranks(4, in_pieces)


def strange_locals():
    mesh = mesh_of((2,))
    coords = tuple(mesh.get_coordinate())
    full = torch.arange(48.0).view(8, 6)
    source = Layout(mesh, [S0], (8, 6), dtype=torch.float32)
    for target in (source.with_placements([S1]), source.with_placements([R])):
        plan = plan_redistribution(source, target)
        part = source.split(full, coords)
        wide = torch.full((4, 20), -1.0)
        wide[:, 3:9] = part
        for local in (part, part.t().contiguous().t(), wide[:, 3:9]):
            before = local.clone()
            assert torch.equal(execute(plan, local, mesh), target.split(full, coords))
            assert torch.equal(local, before)
        with pytest.raises(PlanError, match="is not that of"):
            execute(plan, torch.zeros(4, 5), mesh)


def test_strides_and_offsets_of_a_local_tensor_do_not_matter(ranks):
    ranks(2, strange_locals)


def different_plans():
    mesh = mesh_of((2,))
    source = Layout(mesh, [P], (4, 4), dtype=torch.float32)
    mine = source.with_placements([R if dist.get_rank() else S0])
    with guarded():
        execute(plan_redistribution(source, source.with_placements([S1])), torch.ones(4, 4), mesh)
        try:
            execute(plan_redistribution(source, mine), torch.ones(4, 4), mesh)
        except PlanError as error:
            return str(error)
    return ""


def test_the_guard_names_both_sides_on_every_rank(ranks):
    for text in ranks(2, different_plans):
        assert "about to run different redistributions" in text
        assert "f32[4, 4] {a0: Partial(sum)} -> f32[4@a0, 4]" in text
        assert "f32[4, 4] {a0: Partial(sum)} -> f32[4, 4]" in text


def different_lists():
    """What the guard says where the third of a list, its length, or only the steps differ on a rank."""
    mesh, first = mesh_of((2,)), dist.get_rank() == 0
    source = Layout(mesh, [R], (4, 6), dtype=torch.float32)
    to_rows, to_dim_1, back = (
        plan_redistribution(a, b)
        for a, b in (
            (source, source.with_placements([S0])),
            (source, source.with_placements([S1])),
            (source.with_placements([S0]), source),
        )
    )
    in_pieces = plan_redistribution(back.source, back.target, max_extra_bytes=back.peak_bytes - 8)
    lists = (
        [to_rows, to_rows, to_rows if first else to_dim_1],
        [to_rows] * (2 + first),
        [in_pieces if first else back],
    )
    said = []
    for plans in lists:
        locals_ = [torch.ones(plan.source.local_shape(mesh.get_coordinate())) for plan in plans]
        with guarded(), pytest.raises(PlanError) as caught:
            execute_many(plans, locals_, mesh)
        said.append(str(caught.value))
    with guarded():
        execute_many([to_rows, to_dim_1], [torch.ones(4, 6)] * 2, mesh)
        assert execute_many([], [], mesh) == []
    return said


def test_the_guard_compares_lists_their_lengths_and_steps(ranks):
    for third, length, steps in ranks(2, different_lists):
        assert "f32[4, 6] -> f32[4@a0, 6]" in third
        assert "f32[4, 6] -> f32[4, 6@a0]" in third
        assert "the first of 3: " in length
        assert "the first of 2: " in length
        assert "about to run different redistributions" in steps


def outside():
    mesh = rank_mesh((2, 2), ("a0", "a1"))["a1"]
    source = Layout(mesh, [Ragged((3, 1), (0,))], (8, 6), dtype=torch.float32)
    full = torch.arange(48.0).view(8, 6)
    coords = tuple(mesh.get_coordinate())
    target = source.with_placements([S1])
    result = execute(plan_redistribution(source, target), source.split(full, coords), mesh)
    assert torch.equal(result, target.split(full, coords))


def test_a_submesh_redistributes_on_its_own(ranks):
    ranks(4, outside)
