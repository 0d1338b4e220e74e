"""Process groups of a world, one per distinct partition of its ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.compat.joined_meshes import add_view

Partition = tuple[tuple[int, ...], ...]


class GroupCache:
    """Makes and remembers the groups of mesh axes, so that equal axes of two domains share a communicator.

    Not lazy: every rank of the world makes every group of a partition, in the same order, the first time
    that the partition is asked for. (A group made by its members only takes a name that the others never
    count; the next group that all make then has different names on different ranks, and everybody hangs.)
    """

    def __init__(self, device_type: str) -> None:
        """Start with the group of the whole world."""
        self.root = DeviceMesh.from_group(_world_group(), device_type, mesh_dim_names=("world",))
        self._device_type = device_type
        world = self.root.get_group()
        self._groups: dict[Partition, dist.ProcessGroup] = {(tuple(range(dist.get_world_size())),): world}

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        """Return the mesh of `axes` (name -> size, row-major over the ranks): a view of the root.

        Collective: every rank of the world calls it with the same axes.
        """
        ranks = torch.arange(dist.get_world_size(), device="cpu").view(tuple(axes.values()))
        groups = [self._group(_partition(ranks, index), axis) for index, axis in enumerate(axes)]
        mesh = DeviceMesh.from_group(groups, self._device_type, ranks, mesh_dim_names=tuple(axes))
        return self._view_of_root(mesh)

    def _group(self, partition: Partition, axis: str) -> dist.ProcessGroup:
        """Return this rank's group in `partition`, made by all ranks and called by the axis if it is new."""
        if partition not in self._groups:
            lists = [list(ranks) for ranks in partition]
            own, _ = dist.new_subgroups_by_enumeration(lists, group_desc=f"mesh_{axis}")
            self._groups[partition] = own
        return self._groups[partition]

    def _view_of_root(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return `mesh`, known to torch as a view of the root.

        `fully_shard` and `DTensor` combine two meshes only if both name the same root. The public
        constructors cannot say so for groups that exist already, and `_unflatten` would make every group
        again per domain.
        """
        mesh._root_mesh = self.root
        add_view(self.root, mesh)
        getattr(self.root, "_pg_registry", {}).update(getattr(mesh, "_pg_registry", {}))
        return mesh


def _partition(ranks: torch.Tensor, axis: int) -> Partition:
    """Return the rank lists that one axis of the grid `ranks` forms."""
    rows = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])
    return tuple(tuple(row) for row in rows.tolist())


def _world_group() -> dist.ProcessGroup:
    """Return the default process group."""
    world = dist.group.WORLD
    if world is None:  # pragma: no cover - `ProcessWorld.attach` has initialised it
        raise RuntimeError("the default process group is not initialised")
    return world
