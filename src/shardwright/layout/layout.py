"""`Layout`: where each element of a tensor lives on a mesh.

Not a DTensor (no data), not a process group (no communicator): it can be made and planned with anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from operator import contains
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwright.errors import LayoutError, as_several, refuse_other_kind
from shardwright.index.region import Region, Shape
from shardwright.index.stride import contiguous_stride, ordered_stride, stride_like
from shardwright.layout.applied import Applied
from shardwright.layout.arrangement import Arrangement, arranged, check_pendings, check_steps, order_indices
from shardwright.layout.kind import Kind, find_kind
from shardwright.layout.mesh_shape import Coords, MeshShape, as_mesh_shape
from shardwright.layout.text import format_layout, parse_layout
from shardwright.placement.base import OWN_CLASSES, Placement, Replicate
from shardwright.placement.convert import as_placement
from shardwright.remember import remembered

Placements = Mapping[str, Any] | Sequence[Any]


class Layout:
    """Mesh, one placement per axis, order of application, logical shape, stride and dtype. Frozen.

    Args: mesh: a `DeviceMesh` or a `MeshShape`. placements: one per axis, or {axis name: placement} with
        Replicate for axes not named; torch's objects are accepted. stride: default contiguous.
        order: axis names, first applied first; default left to right. Axes whose order does not matter
        compare equal in any order.
    Raises: LayoutError: counts do not fit. MeshError: an axis does not exist. PlacementError: a placement has
        no meaning for this shape or axis.
    """

    __slots__ = (
        "_arrangement",
        "_base_hash",
        "_hash",
        "_kind",
        "_regions",
        "_shapes",
        "applied",
        "axes",
        "by_runs",
        "dtype",
        "mesh_shape",
        "numel",
        "order",
        "partitions",
        "placements",
        "shape",
        "sizes",
        "stride",
    )

    mesh_shape: MeshShape
    axes: tuple[str, ...]  # the names of the mesh axes
    sizes: tuple[int, ...]  # the sizes of the mesh axes
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    applied: tuple[Applied, ...]  # in order of application, their dims counted in what each one sees
    partitions: tuple[Applied, ...]  # those that cut; of several axes, all of them together
    by_runs: bool  # every cut is of one dim and says so, thus every region is a product of runs
    shape: Shape
    numel: int  # of logical elements
    stride: Shape
    dtype: torch.dtype
    _arrangement: Arrangement
    _base_hash: int  # without the sizes
    _hash: int
    _kind: Kind | bool | None  # False: not asked yet
    _shapes: dict[Coords, Shape]
    _regions: dict[Coords, Region]

    def __init__(
        self,
        mesh: Any,
        placements: Placements,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
        order: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(f"dtype={dtype!r} is no dtype, such as torch.float32")
        if order is None:
            order = getattr(placements, "order", None)  # of OrderedPlacements
        mesh_shape = as_mesh_shape(mesh)
        # Integers: a graph that is traced with symbolic sizes holds for the sizes that it was planned with.
        given: Any = shape, stride
        try:
            shape = tuple(map(int, shape))
            stride = contiguous_stride(shape) if stride is None else tuple(map(int, stride))
        except (TypeError, ValueError):
            shape = stride = (-1,)
        if min(shape + stride, default=0) < 0 or isinstance(given[0], str) or isinstance(given[1], str):
            as_lengths("shape", given[0])
            as_lengths("stride", given[1])
        if len(stride) != len(shape):
            raise LayoutError(f"stride {stride} does not fit shape {shape}: give one number for each dim")
        known = _one_per_axis(placements, mesh_shape), mesh_shape.sizes, shape
        left_to_right = isinstance(order, tuple | list) and tuple(order) == mesh_shape.axes
        if order is None or left_to_right:
            found = arranged(*known, tuple(range(len(mesh_shape.axes))))
        else:
            found = arranged(*known, order_indices(order, mesh_shape))
        if found.foreign:
            check_pendings(found.applied, dtype)
        base_hash = hash((mesh_shape, found.placements, found.order, dtype))
        self._set(mesh_shape, found, shape, stride, dtype, False, base_hash)

    @staticmethod
    def of_kind(kind: Kind, shape: Shape) -> Layout:
        """The layout of this kind for a tensor of this shape: unchecked, its dims are 0, 1 or more as there.

        Made in a tenth of the time: nothing is resolved, ordered or validated again.
        """
        stride = contiguous_stride(shape) if kind.rows else ordered_stride(shape, kind.stride_order)
        if kind.arrangement.foreign:
            check_steps(kind.arrangement.applied, shape)
        self = Layout.__new__(Layout)
        self._set(kind.mesh_shape, kind.arrangement, shape, stride, kind.dtype, kind, kind.base_hash)
        return self

    def _set(
        self,
        mesh_shape: MeshShape,
        arrangement: Arrangement,
        shape: Shape,
        stride: Shape,
        dtype: torch.dtype,
        kind: Kind | bool,
        base_hash: int,
    ) -> None:
        put = object.__setattr__
        put(self, "mesh_shape", mesh_shape)
        put(self, "axes", mesh_shape.axes)
        put(self, "sizes", mesh_shape.sizes)
        put(self, "shape", shape)
        put(self, "numel", prod(shape))
        put(self, "stride", stride)
        put(self, "dtype", dtype)
        put(self, "_arrangement", arrangement)
        put(self, "placements", arrangement.placements)
        put(self, "order", arrangement.order)
        put(self, "applied", arrangement.applied)
        put(self, "partitions", arrangement.partitions)
        put(self, "by_runs", arrangement.by_runs)
        put(self, "_kind", kind)
        put(self, "_base_hash", base_hash)
        put(self, "_hash", hash((base_hash, shape, stride)))
        put(self, "_shapes", {})
        put(self, "_regions", {})

    # ------------------------------------------------------------------------------------ the facts

    @property
    def kind(self) -> Kind | None:
        """What it has in common with layouts of other sizes; None where sizes matter. Remembered."""
        known = self._kind
        if known is False:
            known = find_kind(
                self._base_hash, self.mesh_shape, self._arrangement, self.dtype, self.shape, self.stride
            )
            object.__setattr__(self, "_kind", known)
        return known  # type: ignore[return-value]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, row-major over the axes."""
        return self.mesh_shape.ranks

    @property
    def order_names(self) -> tuple[str, ...]:
        """Axis names in order of application."""
        return tuple([self.axes[axis] for axis in self.order])

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every rank holds the whole finished tensor."""
        return all(p.is_replicated for p in self.placements)

    @property
    def pending_axes(self) -> tuple[int, ...]:
        """Positions of the axes that are still to be reduced."""
        return tuple(axis for axis, p in enumerate(self.placements) if p.is_pending)

    @property
    def is_even(self) -> bool:
        """True only if all ranks hold equally many elements: every step is even on what it is given."""
        shape = self.shape
        for step in self.applied:
            if not step.even(shape):
                return False
            shape = step.local_shape(shape, 0)
        return True

    def coords_of(self, rank: int) -> Coords:
        """The coord of a rank on every axis."""
        return self.mesh_shape.coords_of(rank)

    # ------------------------------------------------------------------------------ what a rank holds

    def local_shape(self, coords: Coords) -> Shape:
        """Shape of the local tensor at these coords. Remembered."""
        try:
            known = self._shapes.get(coords)
        except TypeError:  # a list
            self._refuse_coords(coords)
        if known is None:
            known = self._shapes[coords] = self.shapes_along_order(coords)[-1]
        return known

    def shapes_along_order(self, coords: Coords) -> tuple[Shape, ...]:
        """The shape that each placement sees, in order of application; last, the local shape.

        Raises: LayoutError: no rank has these coords.
        """
        given: object = coords
        if (
            not isinstance(given, tuple)
            or len(given) != len(self.sizes)
            or not all(map(contains, map(range, self.sizes), given))
        ):
            self._refuse_coords(coords)
        shapes = [self.shape]
        for step in self.applied:
            shapes.append(step.local_shape(shapes[-1], step.coord(coords)))
        return tuple(shapes)

    def local_stride(self, coords: Coords) -> Shape:
        """Stride of the local tensor: its dims are stored in the order of the logical stride."""
        return stride_like(self.local_shape(coords), self.stride)

    def region(self, coords: Coords) -> Region:
        """What these coords hold: boxes in logical indices, in local order. Remembered.

        A Pending holds a term of every element of the region, not the element.
        """
        known = self._regions.get(coords) if type(coords) is tuple else None
        if known is None:
            self.local_shape(coords)  # refuses what no rank has
            known = self._regions[coords] = self._compose(coords)
        return known

    def _refuse_coords(self, coords: object) -> NoReturn:
        sizes = " x ".join(map(str, self.sizes))
        raise LayoutError(
            f"coords={coords!r:.60} are none of a mesh of {sizes} ranks\n"
            "  fix: one for each axis, in a tuple: layout.coords_of(rank)"
        )

    def _compose(self, coords: Coords) -> Region:
        region: Region | None = None
        for step in self.applied:
            if step.partition is not None:
                region = step.region(self.shape, region, step.coord(coords))
        return Region.whole(self.shape) if region is None else region

    # ------------------------------------------------------------------------------------- variations

    def with_placements(
        self, placements: Placements | Mapping[int, Any], order: Sequence[str] | None = None
    ) -> Layout:
        """The same tensor under other placements.

        A sequence replaces them all and, without `order`, is applied left to right; a mapping changes the
        axes that it names, or says the index of, and, without `order`, keeps the order.
        """
        if isinstance(placements, Mapping):
            order = self.order_names if order is None else order
            positions: Any = range(len(self.axes))
            known = [a if a in positions else self.mesh_shape.axis_index(a) for a in placements]  # type: ignore[arg-type]
            given = dict(zip(known, placements.values(), strict=True))
            placements = [given.get(axis, p) for axis, p in enumerate(self.placements)]
        return Layout(
            self.mesh_shape, placements, self.shape, dtype=self.dtype, stride=self.stride, order=order
        )

    def replicated(self) -> Layout:
        """The same tensor whole and finished on every rank, in the same order of the axes."""
        return self.with_placements((Replicate(),) * len(self.placements))

    def with_shape(
        self, shape: Sequence[int], stride: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Layout:
        """The same placements and order for another tensor."""
        names = self.order_names
        return Layout(
            self.mesh_shape,
            self.placements,
            shape,
            dtype=self.dtype if dtype is None else dtype,
            stride=stride,
            order=names,
        )

    def is_placed_as(self, other: Layout) -> bool:
        """The same placements, applied in the same order, of a tensor of the same shape?"""
        return self.placements == other.placements and self.order == other.order

    def is_ordered_as(self, other: Layout) -> bool:
        """Would the axes of this order apply the placements of the other in the same way?"""
        if self.order == other.order:
            return True
        return self.with_placements(other.placements, order=self.order_names).order == other.order

    # ---------------------------------------------------------------------------------------- tensors

    def split(self, full: Tensor, coords: Coords) -> Tensor:
        """The local tensor of these coords, without communication; a view of `full` where it can be one.

        Raises: LayoutError: `full` has another shape.
        """
        refuse_other_kind("split: full", full, Tensor, LayoutError, fix="the whole tensor")
        if tuple(full.shape) != self.shape:
            raise LayoutError(f"a tensor of shape {tuple(full.shape)} cannot be split as {self}")
        self.local_shape(coords)  # refuses what no rank has
        for step in self.applied:
            full = step.split(full, step.coord(coords))
        return full

    def join(self, locals: Sequence[Tensor]) -> Tensor:  # noqa: A002 - the word of the laws
        """The full tensor from the local tensors of all ranks, in the order of `ranks`."""
        parts = as_several("join: locals", locals, LayoutError, fix="the local tensor of each rank")
        if len(parts) != len(self.ranks):
            raise LayoutError(
                f"{len(parts)} local tensors for a mesh of {len(self.ranks)} ranks: give one for "
                "each, in the order of layout.ranks"
            )
        return self._join(parts, 0, (0,) * len(self.sizes), self.shape)

    def _join(self, parts: Sequence[Tensor], level: int, coords: Coords, shape: Shape) -> Tensor:
        if level == len(self.applied):
            return parts[self.mesh_shape.index_at(coords)]
        step = self.applied[level]
        joined = []
        for coord in range(1 if step.placement.is_replicated else step.size):
            at = step.at(coords, coord)
            joined.append(self._join(parts, level + 1, at, step.local_shape(shape, coord)))
        return step.join(joined, shape)

    # ------------------------------------------------------------------------------------------ object

    def __eq__(self, other: object) -> bool:
        """Equal: the same tensor, laid out in the same way on the same ranks."""
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        if self._hash != other._hash or self.shape != other.shape or self.stride != other.stride:
            return False
        mine, theirs = self._arrangement, other._arrangement  # mostly one object, see `arranged`
        alike = mine is theirs or (mine.placements == theirs.placements and mine.order == theirs.order)
        return alike and self.dtype == other.dtype and self.mesh_shape == other.mesh_shape

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Layout.{name}: layouts are frozen; use with_placements or with_shape")

    def __str__(self) -> str:
        return format_layout(self)

    def __repr__(self) -> str:
        return f"Layout({self} on {self.mesh_shape!r})"

    @staticmethod
    def parse(text: str, mesh: Any) -> Layout:
        """The layout that `str` wrote, on a mesh with the axes that the text names.

        Raises: LayoutError: the text is not the text of a layout.
        """
        known = as_mesh_shape(mesh)
        said = parse_layout(text, known)
        return Layout(
            known, said.placements, said.shape, dtype=said.dtype, stride=said.stride, order=said.order
        )

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.mesh_shape, self.placements, self.shape, self.dtype, self.stride, self.order_names)
        return _rebuild, arguments


@remembered(4096)
def all_hold_some(layout: Layout) -> bool:
    """Does every rank surely hold elements?"""
    return layout.numel > 0 and layout.is_even


def _rebuild(
    mesh: MeshShape,
    placements: tuple[Placement, ...],
    shape: Shape,
    dtype: torch.dtype,
    stride: Shape,
    order: tuple[str, ...],
) -> Layout:
    return Layout(mesh, placements, shape, dtype=dtype, stride=stride, order=order)


_REPLICATE = Replicate()


def _one_per_axis(placements: Placements, mesh: MeshShape) -> tuple[Placement, ...]:
    if isinstance(placements, Mapping):
        given = {mesh.axis_index(name): as_placement(p) for name, p in placements.items()}
        return tuple([given.get(axis, _REPLICATE) for axis in range(len(mesh.axes))])
    if not isinstance(placements, tuple | list):
        fix = f"one placement for each of {mesh.axes}, or {{axis name: placement}}"
        placements = as_several("placements", placements, LayoutError, fix=fix)
    if len(placements) != len(mesh.axes):
        raise LayoutError(
            f"{len(placements)} placements for a mesh with {len(mesh.axes)} axes ({', '.join(mesh.axes)}): "
            "give one for each, or {axis name: placement}"
        )
    for placement in placements:
        if type(placement) not in OWN_CLASSES:
            return tuple(map(as_placement, placements))
    return tuple(placements)


def as_lengths(name: str, given: Any) -> Shape:
    """Numbers from 0 on, one for each dim. Raises: LayoutError: it is none of these."""
    try:
        lengths = tuple(map(int, given))
    except (TypeError, ValueError):
        lengths = (-1,)
    if min(lengths, default=0) < 0 or isinstance(given, str):
        raise LayoutError(f"{name}={given!r:.60} is no sequence of lengths, such as (4, 6)")
    return lengths
