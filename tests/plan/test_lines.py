"""The tables of lines say of every rank what its region says, and count what a walk over elements counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.index.grid import numel
from shardwright.index.overlap import overlaps, shared, source_views, target_views
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Owner, Replicate, Shard, ZigZag
from shardwright.plan import lines
from shardwright.plan.cost import shared_counts
from shardwright.plan.exchange import Exchange, shared_with_peers
from shardwright.plan.holders import LayoutMap, MixedMap, SlabMap, every_coords
from shardwright.plan.lines import groups_of
from tests.generators import LAW
from tests.plan.test_redistribution_laws import layout_pairs

pairs = layout_pairs()


def elements(which, coords) -> set[int]:
    """The flat numbers of what a rank holds: by the layout's region, or by the cell of another map."""
    if isinstance(which, LayoutMap):
        numbers = np.arange(which.elements).reshape(which.layout.shape)
        return {int(i) for box in which.layout.region(coords).boxes for i in numbers[box.slices].reshape(-1)}
    numbers = np.arange(which.source.elements).reshape(which.source.layout.shape)
    found = (numbers[np.ix_(*map(indices, grid.dims))] for grid in which.cell(coords))
    return {int(i) for grid in found for i in grid.reshape(-1)}


def indices(pieces) -> list[int]:
    return [i for piece in pieces for i in range(piece.offset, piece.offset + piece.size)]


def of_lines(which, coords, shape) -> set[int]:
    """The flat numbers of what the lines of a map name."""
    held = np.ones(shape, dtype=bool)
    for line in which.lines:
        mask = np.zeros([shape[dim] for dim in line.group], dtype=bool)
        for low, size in zip(line.low[line.held_by(coords)], line.size[line.held_by(coords)], strict=True):
            mask[tuple(slice(a, a + b) for a, b in zip(low, size, strict=True))[: mask.ndim]] = True
        at = [shape[dim] if dim in line.group else 1 for dim in range(len(shape))]
        held &= mask.reshape(at)
    return set(np.flatnonzero(held.reshape(-1)).tolist())


def maps_of(pair: tuple[Layout, Layout]) -> tuple[LayoutMap, LayoutMap]:
    groups = groups_of(pair)
    return LayoutMap(pair[0], groups), LayoutMap(pair[1], groups)


@LAW
@given(pairs)
def test_lines_name_what_each_rank_holds(pair):
    for which in maps_of(pair):
        for coords in every_coords(which.sizes):
            assert of_lines(which, coords, pair[0].shape) == elements(which, coords)


@LAW
@given(pairs)
def test_positions_are_those_of_the_local_tensor(pair):
    for which in maps_of(pair):
        if not which.is_product:
            continue
        for coords in every_coords(which.sizes):
            for grid in which.cell(coords):
                for line, pieces in zip(which.lines, grid.dims, strict=True):
                    mask = line.held_by(coords)
                    held = zip(line.low[mask, 0], line.size[mask, 0], line.position[mask], strict=True)
                    mine = {low + n: at + n for low, size, at in held for n in range(size)}
                    assert mine == {i + n: at + n for i, size, at in pieces for n in range(size)}


@LAW
@given(pairs, st.integers(0, 7), st.integers(1, 5), st.data())
def test_mixed_and_cut_maps_are_disjoint_and_lose_nothing(pair, axes, count, data):
    before, after = maps_of(pair)
    chosen = frozenset(a for a in range(len(before.sizes)) if axes >> a & 1)
    free = tuple(a for a in range(len(before.sizes)) if a not in before.cut | after.cut)
    middle = MixedMap(before, after, chosen & before.cut - after.cut, free)
    slabs = [SlabMap(before, middle, count, index) for index in range(count)]
    sizes = before.sizes
    distinct = [c for c in every_coords(sizes) if all(not at or a in middle.cut for a, at in enumerate(c))]
    found = [elements(middle, coords) for coords in distinct]
    assert sum(map(len, found)) == before.elements == len(set().union(*found))
    for coords, whole in zip(distinct, found, strict=True):
        assert len(whole) == numel(middle.cell(coords)) == int(np.broadcast_to(middle.counts, sizes)[coords])
        assert np.prod(middle.local_shape(coords)) == len(whole)
        parts = [elements(slab, coords) for slab in slabs]
        assert sum(map(len, parts)) == len(whole)
        assert set().union(*parts) == whole
        assert all(numel(slab.cell(coords)) == len(part) for slab, part in zip(slabs, parts, strict=True))
        assert all(len(part) <= len(parts[-1]) for part in parts)


@LAW
@given(pairs)
def test_counts_are_those_of_a_walk_over_all_ranks(pair):
    before, after = maps_of(pair)
    sizes = before.sizes
    step = Exchange(before, after, tuple(range(len(sizes))))
    own, (sent, got) = shared_counts(before, after), step.traffic()
    coords = every_coords(sizes)
    for me in coords:
        mine, wanted = before.cell(me), after.cell(me)
        assert np.broadcast_to(own, sizes)[me] == shared(mine, wanted)
        everything = [shared(mine, after.cell(peer)) for peer in coords]
        assert np.broadcast_to(sent, sizes)[me] == sum(everything) - shared(mine, wanted)
        assert np.broadcast_to(got, sizes)[me] == numel(wanted) - shared(mine, wanted)


@LAW
@given(pairs)
def test_what_peers_share_is_what_their_cells_share(pair):
    before, after = maps_of(pair)
    sizes = before.sizes
    step = Exchange(before, after, tuple(range(len(sizes))))
    me = tuple(size // 2 for size in sizes)
    members = step.members(me)
    memory = before.memory(me), after.memory(me)
    shared = shared_with_peers(before, after, step.axes, me, members, memory)
    for peer, (arriving, leaving) in zip(members, shared, strict=True):
        assert target_views(arriving) == target_views(overlaps(before.cell(peer), after.cell(me)))
        assert source_views(leaving) == source_views(overlaps(before.cell(me), after.cell(peer)))


def _forget() -> None:
    for known in (lines._cutting, lines._dim_line):
        known.cache_clear()


@pytest.mark.parametrize("fault", ["position", "coord"])
def test_a_planted_fault_in_the_tables_is_found(monkeypatch, fault):
    right = lines._shares

    def wrong(*args):
        table = right(*args).copy()
        if len(table) > 1:
            column = {"position": 3, "coord": 2}[fault]
            table[[0, -1], column] = table[[-1, 0], column]
        return table

    _forget()
    monkeypatch.setattr(lines, "_shares", wrong)
    layout = Layout(MeshShape(("dp",), (3,)), [ZigZag(0)], (13,), dtype=torch.float32)
    checks = {
        "position": test_positions_are_those_of_the_local_tensor,
        "coord": test_lines_name_what_each_rank_holds,
    }
    with pytest.raises(AssertionError):
        checks[fault].hypothesis.inner_test((layout, layout))
    _forget()


@pytest.mark.parametrize("shape", [(1, 8), (5, 1), (1, 1), (0, 4), (6, 4)])
@pytest.mark.parametrize("kept", [Shard(0), Owner(1), Shard(1), Replicate()])
def test_a_dim_that_is_laid_out_alike_is_shared_with_whom_it_is_held_by(shape, kept):
    """A dim of one piece may still be cut: then all but one coord hold nothing of it."""
    mesh = MeshShape(("a", "b"), (2, 2))
    source = Layout(mesh, [kept, Shard(1)], shape, dtype=torch.float32)
    target = Layout(mesh, [kept, Replicate()], shape, dtype=torch.float32)
    groups = groups_of((source, target))
    before, after = LayoutMap(source, groups), LayoutMap(target, groups)
    members = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for me in members:
        near = [peer for peer in members if peer[0] == me[0]]
        memory = before.memory(me), after.memory(me)
        found = shared_with_peers(before, after, (1,), me, near, memory)
        for peer, (incoming, outgoing) in zip(near, found, strict=True):
            assert sum(each.numel for each in incoming) == shared(before.cell(peer), after.cell(me))
            assert sum(each.numel for each in outgoing) == shared(before.cell(me), after.cell(peer))
