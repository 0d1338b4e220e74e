"""What cannot be an argument of a layout, a plan or a map is refused by its name, in an error of ours."""

import pytest
import torch

import shardwright as sw
from shardwright import checkpoint
from shardwright.errors import CheckpointError, LayoutError, MeshError, PlacementError, PlanError

MESH = sw.layout.MeshShape(("tp",), (2,))


def _layout(shape):
    return sw.Layout(MESH, [sw.Shard(0)], shape, dtype=torch.float32)


@pytest.mark.parametrize("shape", [4, "12", None, (-4,), ("a",), (None,)])
def test_a_shape_is_a_sequence_of_lengths(shape):
    with pytest.raises(LayoutError, match=r"shape=.* is no sequence of lengths"):
        _layout(shape)


@pytest.mark.parametrize("coords", [(5,), (-1,), (0, 0), (), 1, None])
def test_coords_are_those_of_a_rank(coords):
    """Others had got the part of another rank, or none."""
    layout = _layout((4,))
    for ask in (layout.local_shape, layout.region):
        with pytest.raises(LayoutError, match=r"coords=.* are none of a mesh of 2 ranks"):
            ask(coords)
    assert layout.local_shape((1,)) == (2,)


@pytest.mark.parametrize("dim", ["0", None, 1.5])
def test_a_dim_is_a_number(dim):
    with pytest.raises(PlacementError, match=r"Shard: dim=.* is no number of a dim"):
        sw.Shard(dim)


@pytest.mark.parametrize("most", ["1MB", -1, 1.5, True])
def test_extra_bytes_are_a_number(most):
    layout = _layout((4,))
    with pytest.raises(PlanError, match=r"max_extra_bytes=.* is no number of bytes"):
        sw.plan_redistribution(layout, layout.replicated(), max_extra_bytes=most)


def test_other_kinds_of_things_are_refused_by_name():
    with pytest.raises(MeshError, match="mesh='cpu' is no mesh"):
        sw.Layout("cpu", [sw.Shard(0)], (4,), dtype=torch.float32)
    with pytest.raises(LayoutError, match="None is not a layout's text"):
        sw.Layout.parse(None, MESH)
    with pytest.raises(LayoutError, match="to_partition_spec: layout=None is no Layout"):
        sw.to_partition_spec(None)


def test_a_stack_of_a_checkpoint_tells_its_tensors_apart():
    with pytest.raises(CheckpointError, match=r"source names no \{index\}"):
        checkpoint.stack("(.*)", r"\1")
    assert checkpoint.step_of("a/checkpoints/step-00000005") == 5
