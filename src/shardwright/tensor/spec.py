"""The description that a DTensor carries: torch's `DTensorSpec`, answered from one `Layout`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwright.compat import shard_order_axes
from shardwright.errors import LayoutError
from shardwright.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class LocalUse:
    """How a parameter takes part in computation: as its local tensor on `axes`.

    axes:   mesh axes on which the computation sees the local tensor.
    summed: those of `axes` on which the gradients of the ranks must still be added up.
    """

    axes: tuple[str, ...]
    summed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Extra:
    """What torch's spec has no field for; it travels where torch keeps its shard order."""

    order: tuple[int, ...]
    use: LocalUse | None


class Spec(DTensorSpec):
    """torch's spec as a view of a layout: nothing in it can disagree with the layout.

    Not a dataclass of its own: torch reads `mesh`, `placements`, `tensor_meta` and `shard_order`.
    """

    layout: Layout
    use: LocalUse | None

    def __init__(self, layout: Layout, mesh: DeviceMesh, use: LocalUse | None = None) -> None:
        fields = self.__dict__
        fields["layout"] = layout
        fields["use"] = use
        fields["mesh"] = mesh
        fields["placements"] = layout.placements
        fields["tensor_meta"] = TensorMeta(torch.Size(layout.shape), tuple(layout.stride), layout.dtype)
        fields["shard_order"] = Extra(layout.order, use)
        fields["use_strided_shard_as_shard_order"] = False
        fields["_hash"] = hash((layout, use))

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Spec):
            return NotImplemented
        return self.layout == other.layout and self.use == other.use and self.mesh == other.mesh

    def __copy__(self) -> Spec:
        return Spec(self.layout, self.mesh, self.use)

    def __reduce__(self) -> tuple[Any, ...]:
        return Spec, (self.layout, self.mesh, self.use)


@lru_cache(maxsize=65536)
def spec_of(layout: Layout, mesh: DeviceMesh, use: LocalUse | None = None) -> Spec:
    """The one spec object of a layout on a mesh: cached, so that dispatch compares by identity."""
    return Spec(layout, mesh, use)


def layout_of(spec: DTensorSpec) -> Layout:
    """The layout that a spec means, torch's own specs included.

    Raises: LayoutError: the spec has no tensor metadata.
    """
    if isinstance(spec, Spec):
        return spec.layout
    meta = spec.tensor_meta
    if meta is None:
        raise LayoutError("a DTensorSpec without tensor_meta has no logical shape, so no layout")
    placements, order = shard_order_axes(spec)
    return Layout(
        spec.mesh, placements, tuple(meta.shape), dtype=meta.dtype, stride=tuple(meta.stride), order=order
    )


def with_dtype(layout: Layout, dtype: torch.dtype) -> Layout:
    """The same placements, shape and stride for elements of another type."""
    if layout.dtype == dtype:
        return layout
    return layout.with_shape(layout.shape, layout.stride, dtype=dtype)


@lru_cache(maxsize=1024)
def coords_of(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """This rank's coordinates on the mesh, None when it is not part of it."""
    found = mesh.get_coordinate()
    return None if found is None else tuple(found)
