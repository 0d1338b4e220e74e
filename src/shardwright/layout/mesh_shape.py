"""`MeshShape`: the names, sizes and ranks of a mesh. Not a `DeviceMesh`: it has no device and no group."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

from shardwright.compat import without_modes
from shardwright.errors import MeshError, as_several
from shardwright.remember import memo

Coords = tuple[int, ...]
_WHOLE: Any = Integral  # numpy's, too


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
        self.axes = as_several("MeshShape: axes", axes, MeshError, fix='a name for each axis: ("tp",)')
        self.sizes = as_several("MeshShape: sizes", sizes, MeshError, fix="a size for each axis: (2,)")
        self._check_axes()
        every = range(prod(self.sizes)) if ranks is None else ranks
        self.ranks = as_several("MeshShape: ranks", every, MeshError, fix="row-major: (0, 1)")
        self._check_ranks()
        self._hash = hash((self.axes, self.sizes, self.ranks))
        self._index: dict[int, int] | None = None

    def _check_axes(self) -> None:
        if not all(isinstance(axis, str) for axis in self.axes):
            raise MeshError(f"mesh axes {self.axes}: each is a name")
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise MeshError(f"axes {self.axes} do not name the sizes {self.sizes} one by one; name each")
        if not all(isinstance(size, _WHOLE) and size >= 1 for size in self.sizes):
            raise MeshError(f"mesh sizes {self.sizes}: each must be at least 1")

    def _check_ranks(self) -> None:
        if not all(isinstance(rank, _WHOLE) for rank in self.ranks):
            raise MeshError(f"mesh ranks {self.ranks}: each is a whole number")
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
        try:
            return self._index[rank]
        except (KeyError, TypeError):
            raise MeshError(f"rank {rank!r:.60} is not in the mesh {self}") from None

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


def are_relatives(one: MeshShape, two: MeshShape) -> bool:
    """Is one of them this rank's slice of the other?"""
    small, large = sorted((one, two), key=lambda mesh: len(mesh.axes))
    if not set(small.axes) <= set(large.axes) or not set(small.ranks) <= set(large.ranks):
        return False
    first = large.coords_of(small.ranks[0])
    places = [large.axes.index(axis) for axis in small.axes]
    for rank in small.ranks:
        coords = list(first)
        for place, coord in zip(places, small.coords_of(rank), strict=True):
            coords[place] = coord
        if large.rank_at(tuple(coords)) != rank:
            return False
    return True


def _from_device_mesh(mesh: Any) -> MeshShape:
    with without_modes():  # a mesh may be met first where tensors are fake
        ranks = mesh.mesh
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(ranks.ndim)]
    return MeshShape(names, ranks.shape, ranks.flatten().tolist())
