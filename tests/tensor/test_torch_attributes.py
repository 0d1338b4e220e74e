"""What torch says of a tensor under a name of its own, a DTensor says too, whoever asks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor as torch_distribute

import shardwright as sw
from shardwright.errors import LayoutError
from shardwright.show.table import layout_table
from tests.tiers import only

from .cases import full, layouts_of, mesh, place


def _layout():
    """Law: `x.layout` is torch's for everybody; the `Layout` comes from `layout_of`, of any DTensor."""
    grid = mesh()
    for placements in layouts_of(2):
        x = place(full(5, 4), placements)
        layout = sw.layout_of(x)
        assert x.layout is torch.strided
        assert isinstance(layout, sw.Layout)
        assert (layout.placements, layout.shape, layout.stride) == (placements, (5, 4), (4, 1))
        made = torch.zeros(2, dtype=x.dtype, layout=x.layout)
        assert made.layout is x.layout
        assert torch.zeros_like(x, layout=x.layout).layout is torch.strided
    theirs = torch_distribute(full(5, 4), grid, [sw.Shard(0)] * grid.ndim)
    ours = sw.distribute_tensor(full(5, 4), grid, [sw.Shard(0)] * grid.ndim)
    assert sw.layout_of(theirs) == sw.layout_of(ours)
    assert layout_table({"theirs": theirs}).rows == layout_table({"theirs": ours}).rows
    with pytest.raises(LayoutError, match="a plain Tensor has no Layout") as caught:
        sw.layout_of(full(3))
    assert "sw.distribute_tensor" in str(caught.value)
    return str(sw.layout_of(ours)) if dist.get_world_size() == 2 else ""


@pytest.mark.parametrize("world", only([2], [2, 4]))
def test_layout_is_torchs_and_layout_of_is_ours(ranks, world):
    assert set(ranks(world, _layout)) <= {"f32[5@tp, 4]", ""}
