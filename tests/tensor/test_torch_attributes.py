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
from .hearing import Heard


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


def _gradients():
    grid = mesh()
    x = sw.distribute_tensor(full(6, 4), grid, [sw.Shard(0)] * grid.ndim).requires_grad_()
    assert x.grad is None
    (x * 2).sum().backward()
    made = x.grad
    assert isinstance(made, sw.DTensor)
    assert x.grad is made
    with Heard() as heard:
        assert x.grad is made
        x.grad = None
    assert heard.names[0] == "__get__"
    assert "__set__" in heard.names
    assert x.grad is None
    x.grad = made
    with pytest.raises(RuntimeError):
        x.grad = made[:2]
    assert x.grad is made
    x.grad = plain = torch.full((6, 4), float(dist.get_rank()))  # a user's own: nobody says where it lies
    assert x.grad is plain
    del x.grad
    assert x.grad is None
    asked = []
    whole = type(x).__torch_function__
    try:
        type(x).__torch_function__ = classmethod(lambda *given: asked.append(given) or whole(*given[1:]))
        assert x.grad is None
        x.grad = made
        del x.grad
        x.grad = None
    finally:
        type(x).__torch_function__ = whole
    return len(asked)


def test_a_gradient_is_read_as_torch_keeps_it_and_no_function_of_the_class_is_asked(ranks):
    assert ranks(2, _gradients, fresh=True) == [0, 0]
