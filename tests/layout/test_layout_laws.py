"""Laws of layouts, on any mesh, any shipped placements, any shape and any order of application."""

from __future__ import annotations

import pickle

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.layout import Layout
from shardwright.testing.check_placement import layout_law
from tests.generators import LAW, distributed, layouts, numbered


@LAW
@given(layouts())
def test_join_undoes_split_bit_for_bit(layout: Layout) -> None:
    x = numbered(layout)
    joined = layout.join(distributed(layout, x))
    assert joined.dtype == x.dtype
    assert torch.equal(joined, x)


@LAW
@given(layouts(pending=False, dtype=torch.int64))
def test_the_region_of_every_rank_is_what_it_holds(layout: Layout) -> None:
    assert layout_law(layout) is None


@LAW
@given(layouts(pending=False))
def test_the_regions_of_partitions_cover_and_are_disjoint(layout: Layout) -> None:
    held = torch.zeros(layout.shape, dtype=torch.int64)
    for rank in layout.ranks:
        for box in layout.region(layout.coords_of(rank)).boxes:
            held[box.slices] += 1
    assert (held == 1).all()


@LAW
@given(layouts())
def test_local_tensors_keep_the_number_of_dims(layout: Layout) -> None:
    for rank in layout.ranks:
        local = layout.local_shape(layout.coords_of(rank))
        assert len(local) == len(layout.shape) or (not layout.shape and local == (0,))


@LAW
@given(layouts())
def test_the_text_of_a_layout_parses_back(layout: Layout) -> None:
    assert Layout.parse(str(layout), layout.mesh_shape) == layout


@LAW
@given(layouts())
def test_a_layout_survives_pickle(layout: Layout) -> None:
    made = pickle.loads(pickle.dumps(layout))
    assert made == layout
    assert hash(made) == hash(layout)
    assert made.order == layout.order


@LAW
@given(layouts(dtype=torch.int64), st.data())
def test_layouts_that_differ_in_order_are_equal_only_if_they_hold_the_same(
    layout: Layout, data: st.DataObject
) -> None:
    other = layout.with_placements(layout.placements, data.draw(st.permutations(layout.axes)))
    if other == layout:
        assert hash(other) == hash(layout)
        x = numbered(layout)
        for mine, theirs in zip(distributed(layout, x), distributed(other, x), strict=True):
            assert mine.shape == theirs.shape
            assert torch.equal(mine, theirs)


@LAW
@given(layouts(pending=False))
def test_gradients_flow_back_to_the_element_that_was_split(layout: Layout) -> None:
    assume(layout.numel)
    x = numbered(layout).requires_grad_()
    weight = torch.randn(layout.shape)
    joined = layout.join(distributed(layout, x))
    (joined * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)
