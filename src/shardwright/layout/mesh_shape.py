"""`MeshShape`: the names, sizes and ranks of a mesh. Not a `DeviceMesh`: it has no device and no group."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from shardwright.compat import without_modes
from shardwright.errors import MeshError
from shardwright.remember import memo

Coords = tuple[int, ...]


class MeshShape:
    """An n-d grid of ranks with named axes. Frozen; the hash is computed once.

    Args: axes: one distinct name per axis. sizes: one size per axis. ranks: row-major, default 0, 1, 2, ...
    Raises: MeshError: names, sizes and ranks do not fit together.
    """

    __slots__ = ("_hash", "_index", "axes", "ranks", "sizes")

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __init__(self, axes: Iterable[str], sizes: Iterable[int], ranks: Iterable[int] | None = None) -> None:
        self.axes = tuple(axes)
        self.sizes = tuple(sizes)
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(prod(self.sizes)))
        self._hash = hash((self.axes, self.sizes, self.ranks))
        self._index: dict[int, int] | None = None
        self._check()

    def _check(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise MeshError(f"axes {self.axes} do not name the sizes {self.sizes} one by one")
        if any(size < 1 for size in self.sizes):
            raise MeshError(f"mesh sizes {self.sizes}: each must be at least 1")
        if len(self.ranks) != prod(self.sizes) or len(set(self.ranks)) != len(self.ranks):
            raise MeshError(f"mesh sizes {self.sizes} need {prod(self.sizes)} distinct ranks: {self.ranks}")

    def axis_index(self, name: str) -> int:
        """Position of an axis.

        Raises: MeshError: there is no axis of this name.
        """
        if name not in self.axes:
            raise MeshError(f"the mesh has no axis {name!r}; its axes are {', '.join(self.axes)}")
        return self.axes.index(name)

    def index_of(self, rank: int) -> int:
        """Row-major position of a rank.

        Raises: MeshError: the rank is not in the mesh.
        """
        if self._index is None:
            self._index = {rank: index for index, rank in enumerate(self.ranks)}
        if rank not in self._index:
            raise MeshError(f"rank {rank} is not in the mesh {self}")
        return self._index[rank]

    def coords_of(self, rank: int) -> Coords:
        """The coord of a rank on every axis."""
        index = self.index_of(rank)
        coords = []
        for size in reversed(self.sizes):
            index, coord = divmod(index, size)
            coords.append(coord)
        return tuple(reversed(coords))

    def index_at(self, coords: Coords) -> int:
        """Row-major position of these coords."""
        index = 0
        for coord, size in zip(coords, self.sizes, strict=True):
            index = index * size + coord
        return index

    def rank_at(self, coords: Coords) -> int:
        """The rank at these coords."""
        return self.ranks[self.index_at(coords)]

    def line(self, coords: Coords, axis: int) -> list[int]:
        """The ranks along an axis through these coords, by coord; torch sorts them in the axis' group."""
        return [self.rank_at((*coords[:axis], c, *coords[axis + 1 :])) for c in range(self.sizes[axis])]

    def __eq__(self, other: object) -> bool:
        """Equal: the same axes, sizes and ranks."""
        if self is other:
            return True
        if not isinstance(other, MeshShape) or self._hash != other._hash:
            return False
        return self.axes == other.axes and self.sizes == other.sizes and self.ranks == other.ranks

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))
        return f"MeshShape({sizes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.axes, self.sizes, self.ranks)


_OF_MESH: WeakKeyDictionary[Any, MeshShape] = memo("shapes of meshes", WeakKeyDictionary())


def as_mesh_shape(mesh: Any) -> MeshShape:
    """The shape of a `DeviceMesh`, remembered per mesh; a `MeshShape` unchanged.

    Axes of an unnamed mesh are called axis0, axis1, ...
    """
    if isinstance(mesh, MeshShape):
        return mesh
    try:
        known = _OF_MESH.get(mesh)
    except TypeError:  # nobody can refer to it weakly
        known = None
    if known is None:
        if not hasattr(mesh, "mesh_dim_names"):
            raise MeshError(
                f"mesh={mesh!r:.60} is no mesh\n"
                '  fix: sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), or a MeshShape'
            )
        known = _OF_MESH[mesh] = _from_device_mesh(mesh)
    return known


def ranks_of(mesh: Any) -> frozenset[int]:
    """The ranks of a mesh, in no order; those of other slices are not among them."""
    return frozenset(as_mesh_shape(mesh).ranks)


def _from_device_mesh(mesh: Any) -> MeshShape:
    with without_modes():  # a mesh may be met first where tensors are fake
        ranks = mesh.mesh
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(ranks.ndim)]
    return MeshShape(names, ranks.shape, ranks.flatten().tolist())
