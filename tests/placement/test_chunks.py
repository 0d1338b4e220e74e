"""Chunks of a region: few boxes with views, for checkpoints."""

from __future__ import annotations

import torch
from hypothesis import given

from shardwright.placement import Interleaved, Ragged, chunks_of
from tests.generators import LAW, layouts, numbered


@LAW
@given(layouts(pending=False))
def test_chunks_are_the_region(layout):
    """Each chunk's view of the local tensor is its box of the full tensor; together they are all of it."""
    x = numbered(layout)
    for rank in layout.ranks:
        coords = layout.coords_of(rank)
        local = layout.split(x, coords).contiguous()
        chunks = chunks_of(layout.region(coords))
        for chunk in chunks:
            assert torch.equal(chunk.view(local), x[chunk.box.slices])
            chunk.view(local).zero_()
        assert not local.any()
        assert sum(chunk.box.numel for chunk in chunks) == local.numel()


def test_columns_of_a_tall_matrix_are_one_chunk_each():
    region = Interleaved(1, 2).region((10_000, 8), 2, 1)
    assert len(chunks_of(region)) == 2
    local = torch.zeros(4, 10_000).T
    chunks_of(region)[0].view(local).fill_(1)
    assert local.sum() == 20_000
    assert len(chunks_of(Ragged((1, 2), (0, 1)).region((5, 7), 2, 0))) == 2
