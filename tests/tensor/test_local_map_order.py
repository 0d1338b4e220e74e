"""`local_map`, ours and torch's, of tensors of which the axes of the mesh cut a dim in another order."""

import pytest
import torch
from torch.distributed.tensor import placement_types
from torch.distributed.tensor.experimental import local_map as torchs_local_map

import shardwright as sw
from shardwright.errors import LayoutError
from shardwright.testing import rank_mesh
from tests.tiers import all_but

ROWS = [sw.Shard(0), sw.Shard(0)]
LEFT_TO_RIGHT, TP_FIRST = ("dp", "tp"), ("tp", "dp")


def _placed(rows, order, *, grad=False):
    whole = torch.arange(2.0 * rows).view(rows, 2)
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    return sw.distribute_tensor(whole.requires_grad_(grad), mesh, ROWS, order=order), whole


def _doubled(mapped, **stated):
    return mapped(
        lambda part: part * 2, in_placements=(ROWS,), device_mesh=rank_mesh((2, 2), ("dp", "tp")), **stated
    )


def _moves_or_refuses(rows):
    x, whole = _placed(rows, TP_FIRST)
    with pytest.raises(LayoutError, match="redistribute_inputs=True"):
        _doubled(sw.local_map, out_placements=ROWS)(x)
    moving = _doubled(sw.local_map, out_placements=ROWS, redistribute_inputs=True)
    assert torch.equal(moving(x).full_tensor(), 2 * whole)
    of_shape = _doubled(sw.local_map, out_placements=ROWS, redistribute_inputs=True, out_shapes=[whole.shape])
    compiled = torch.compile(of_shape, backend="aot_eager")  # whose ranks tell each other nothing
    assert torch.equal(compiled(x).full_tensor(), 2 * whole)
    ordered, _ = _placed(rows, LEFT_TO_RIGHT)
    taken = sw.local_map(
        lambda part: part * 2, x.placements, in_placements=(x.placements,), redistribute_inputs=True
    )
    assert torch.equal(taken(ordered).full_tensor(), 2 * whole)
    assert torch.equal(taken(x).full_tensor(), 2 * whole)


@pytest.mark.parametrize("rows", all_but([8], [8, 7, 3]))
def test_an_input_in_another_order_is_moved_or_refused(ranks, rows):
    ranks(4, _moves_or_refuses, rows)


def _gradient(rows):
    factors = torch.arange(2.0 * rows).view(rows, 2) + 1
    x, _ = _placed(rows, TP_FIRST, grad=True)
    moving = _doubled(sw.local_map, out_placements=ROWS, redistribute_inputs=True)
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    (moving(x) * sw.distribute_tensor(factors, mesh, ROWS)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * factors)
    for stated in (ROWS, x.placements, dict(zip(LEFT_TO_RIGHT, ROWS, strict=True))):
        x, _ = _placed(rows, TP_FIRST, grad=True)
        local = x.to_local(grad_placements=stated)
        (local * sw.distribute_tensor(factors, mesh, ROWS, order=TP_FIRST).to_local()).sum().backward()
        assert torch.equal(x.grad.full_tensor(), factors), stated


@pytest.mark.parametrize("rows", [8, 7])
def test_gradients_of_parts_lie_as_the_parts(ranks, rows):
    ranks(4, _gradient, rows)


def _by_torch():
    x, whole = _placed(8, TP_FIRST)
    with pytest.raises(ValueError, match="mismatched placements"):
        _doubled(torchs_local_map, out_placements=(ROWS,))(x)
    moving = _doubled(torchs_local_map, out_placements=(ROWS,), redistribute_inputs=True)
    assert torch.equal(moving(x).full_tensor(), 2 * whole)


def test_torchs_own_is_told_of_the_order(ranks):
    ranks(4, _by_torch)


def _strided():
    """torch's words for the same order are taken where each rank holds just that."""
    strided = [placement_types._StridedShard(0, split_factor=2), placement_types.Shard(0)]
    x, whole = _placed(8, TP_FIRST)
    taken = sw.local_map(lambda part: part * 2, strided, in_placements=(strided,))
    assert torch.equal(taken(x).full_tensor(), 2 * whole)
    with pytest.raises(LayoutError, match="redistribute_inputs=True"):
        taken(_placed(8, LEFT_TO_RIGHT)[0])


def test_strided_cuts_may_say_the_order(ranks):
    ranks(4, _strided)


def _pending():
    """A pending value lies as a whole one does, and is none."""
    mesh = rank_mesh((2,), ("tp",))
    terms = sw.DTensor.from_local(torch.ones(4), mesh, [sw.Partial()])
    with pytest.raises(LayoutError, match="redistribute_inputs=True"):
        sw.local_map(lambda part: part * 2, [sw.Replicate()], in_placements=([sw.Replicate()],))(terms)


def test_what_is_pending_is_not_taken_for_whole(ranks):
    ranks(2, _pending)
