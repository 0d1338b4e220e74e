"""A mesh without its groups."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from shardwright.errors import MeshError
from shardwright.layout import Layout, MeshShape
from shardwright.layout.mesh_shape import as_mesh_shape
from shardwright.placement import Shard


class DeviceMeshLike:
    """What a layout reads of a DeviceMesh."""

    def __init__(self, ranks, names):
        self.reads = 0
        self._ranks = torch.tensor(ranks)
        self.mesh_dim_names = names

    @property
    def mesh(self):
        self.reads += 1
        return self._ranks


def test_a_device_mesh_is_read_once_and_not_kept_alive():
    mesh = DeviceMeshLike([[4, 5, 6], [0, 1, 2]], ("dp", "tp"))
    layout = Layout(mesh, [Shard(0), Shard(1)], (4, 6), dtype=torch.float32)
    assert (layout.axes, layout.sizes, layout.ranks) == (("dp", "tp"), (2, 3), (4, 5, 6, 0, 1, 2))
    assert layout.coords_of(0) == (1, 0)
    assert as_mesh_shape(mesh) is layout.mesh_shape
    assert mesh.reads == 1
    from shardwright.layout.mesh_shape import _OF_MESH

    known = len(_OF_MESH)
    del mesh
    gc.collect()
    assert len(_OF_MESH) < known


def test_axes_of_an_unnamed_mesh_get_names():
    assert as_mesh_shape(DeviceMeshLike([[0, 1]], None)).axes == ("axis0", "axis1")


def test_a_mesh_shape_is_a_value():
    mesh = MeshShape(("a", "b"), (2, 3))
    assert mesh == MeshShape(["a", "b"], [2, 3], range(6))
    assert hash(mesh) == hash(MeshShape(["a", "b"], [2, 3], range(6)))
    assert mesh != MeshShape(("a", "b"), (2, 3), (5, 4, 3, 2, 1, 0))
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert [mesh.coords_of(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert all(mesh.rank_at(mesh.coords_of(rank)) == rank for rank in range(6))


@pytest.mark.parametrize(
    ("message", "build"),
    [
        ("do not name the sizes", lambda: MeshShape(("a",), (2, 3))),
        ("at least 1", lambda: MeshShape(("a",), (0,))),
        ("need 2 distinct ranks", lambda: MeshShape(("a",), (2,), (0, 0))),
        ("no axis 'b'", lambda: MeshShape(("a",), (2,)).axis_index("b")),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(message, build):
    with pytest.raises(MeshError, match=message):
        build()
