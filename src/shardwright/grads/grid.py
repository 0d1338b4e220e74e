"""Which ranks some axes of a mesh join, whatever the axes are called."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from shardwright.remember import remembered


@dataclass(frozen=True)
class GridOfRanks:
    """This rank and those that it meets along some axes, in rows; axes of one rank are not counted.

    Two meshes with one grid send the same messages, in the same order.
    """

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def members(self) -> frozenset[int]:
        """The ranks, in no order."""
        return frozenset(self.ranks)


@remembered(1024)
def grid_of(mesh: DeviceMesh, wanted: tuple[bool, ...]) -> GridOfRanks:
    """The ranks that this one meets along the wanted axes of a mesh that it is part of."""
    here = mesh.get_coordinate() or [0] * mesh.ndim
    ranks = mesh.mesh[tuple(slice(None) if each else at for each, at in zip(wanted, here, strict=True))]
    return GridOfRanks(tuple(n for n in ranks.shape if n > 1), tuple(ranks.flatten().tolist()))


def axes_above_one(mesh: DeviceMesh) -> int:
    """How many axes have more than one rank."""
    return len(grid_of(mesh, (True,) * mesh.ndim).sizes)
