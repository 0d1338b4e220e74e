"""Pictures and tables show what the regions say."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import given, settings

from shardwright.errors import LayoutError
from shardwright.layout import Layout, MeshShape
from shardwright.placement import Owner, Partial, Ragged, Replicate, Shard
from shardwright.show import layout_table, visualize
from shardwright.show.holders import holders_of, ranks_text
from shardwright.show.picture import Picture
from tests.generators import layouts

MESH = MeshShape(("dp", "tp"), (2, 2))


def make(placements, shape, dtype=torch.float32):
    return Layout(MESH, placements, shape, dtype=dtype)


def test_a_matrix_is_drawn_as_a_grid_of_ranks(capsys):
    picture = visualize(make([Shard(0), Shard(1)], (8, 7)))
    assert picture.text.splitlines() == [
        "f32[8@dp, 7@tp] on dp=2 x tp=2",
        "┏━━━━━━━━━━━━━━━┳━━━━━┳━━━━━┓",
        "┃ dim 0 \\ dim 1 ┃ 0:4 ┃ 4:7 ┃",
        "┡━━━━━━━━━━━━━━━╇━━━━━╇━━━━━┩",
        "│ 0:4           │  0  │  1  │",
        "├───────────────┼─────┼─────┤",
        "│ 4:8           │  2  │  3  │",
        "└───────────────┴─────┴─────┘",
    ]
    assert "f32[8@dp, 7@tp]" in capsys.readouterr().out


def test_a_pending_is_named_under_the_picture():
    text = Picture(make([Shard(0), Partial()], (8,))).text
    assert "0-1" in text
    assert "tp: each of its ranks holds a term, the value is Partial(sum)" in text


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_every_element_is_drawn_with_exactly_its_holders(layout):
    holders = holders_of(layout, limit=10_000)
    found = {}
    for block, ranks in holders.ranks.items():
        spans = [holders.spans[dim][i] for dim, i in enumerate(block)]
        found[tuple(spans)] = set(ranks)
    for rank in layout.ranks:
        held = torch.zeros(layout.shape, dtype=torch.bool)
        for box in layout.region(layout.coords_of(rank)).boxes:
            held[box.slices] = True
        for spans, ranks in found.items():
            part = held[tuple(slice(*span) for span in spans)]
            assert bool(part.all()) == bool(part.any()) == (rank in ranks)
    drawn = sum(torch.zeros(layout.shape)[tuple(slice(*span) for span in spans)].numel() for spans in found)
    assert drawn == layout.numel


@pytest.mark.parametrize(
    "layout",
    [
        make([Shard(0), Shard(1)], (8, 7)),
        make([Shard(0), Partial()], (5,)),
        make([Replicate(), Owner(1)], ()),
        make([Ragged((1, 2), (0, 1)), Shard(2)], (3, 4, 6)),
        make([Shard(0), Shard(1)], (0, 3)),
        make([Shard(0), Shard(1)], (1000, 1)),
    ],
)
def test_every_layout_has_text_svg_and_html(layout):
    picture = Picture(layout)
    assert ET.fromstring(picture.svg).tag.endswith("svg")
    assert str(layout).split("]")[0] in picture.text
    assert picture._repr_html_() == picture.html
    assert picture.html.startswith(("<figure>", "<pre>"))


def test_a_drawing_is_in_proportion_and_names_its_ranks():
    root = ET.fromstring(Picture(make([Shard(0), Replicate()], (3,))).svg)
    rects = [node for node in root if node.tag.endswith("rect")]
    assert [float(rect.attrib["width"]) for rect in rects] == [320, 160]
    assert ["".join(rect.itertext()) for rect in rects] == ["ranks 0-1", "ranks 2-3"]


def test_a_large_picture_says_what_it_leaves_out():
    from shardwright.placement import BlockCyclic

    text = Picture(make([BlockCyclic(0, 1), Replicate()], (100,))).text
    assert "not shown: 68 more on dim 0" in text


def test_a_plain_tensor_cannot_be_drawn():
    with pytest.raises(LayoutError, match="plain Tensor has no layout"):
        visualize(torch.zeros(2))


def test_ranks_are_named_in_ranges():
    assert ranks_text((8, 0, 2, 1, 3)) == "0-3, 8"
    assert ranks_text(()) == ""


def test_the_table_of_parameters_counts_bytes():
    table = layout_table(
        {
            "wte.weight": make([Shard(0), Replicate()], (7, 4)),
            "scale": make([Replicate(), Replicate()], (), torch.bfloat16),
            "bias": torch.zeros(3),
        }
    )
    assert [row.local for row in table.rows] == [(4, 4), (), (3,)]
    assert table.local_bytes == 4 * 4 * 4 + 2 + 12
    assert table.total_bytes == 7 * 4 * 4 + 2 + 12
    assert "f32[7@dp, 4]" in table.text
    assert "3 tensors" in table.text
