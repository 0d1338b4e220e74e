"""Factories: distributed tensors that never exist in one place (`rand` and `randn` excepted, see there)."""

from __future__ import annotations

from numbers import Number
from typing import Any, TypedDict, Unpack, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat.dynamo import never_traced
from shardwright.errors import LayoutError, refuse_other_kind
from shardwright.layout.layout import Layout
from shardwright.placement.base import Pending, Replicate
from shardwright.tensor.conversions import current_mesh
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.placements import PlacementsArgument, resolve_placements
from shardwright.tensor.plain.constants import of_constants
from shardwright.tensor.random import counter, mode
from shardwright.tensor.random.shared_stream import shared_stream
from shardwright.tensor.spec import coords_of, spec_of
from shardwright.tensor.wrap import wrap

_in_no_graph = never_traced(
    "a factory of DTensors asks its mesh and placements, which no graph holds; fix: call it before what is "
    "compiled and pass its result in, or inside torch.zeros_like(x), x.new_zeros(size) of a DTensor x"
)


class Options(TypedDict, total=False):
    """What every factory takes by name, as `zeros` says."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: DeviceMesh | None
    placements: PlacementsArgument | None


def _layout(
    size: tuple[Any, ...],
    /,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsArgument | None = None,
    **unknown: Any,
) -> tuple[Layout, DeviceMesh]:
    if not size and "size" in unknown:  # as torch's factories take it
        size = (unknown.pop("size"),)
    if unknown:
        name = next(iter(unknown))
        raise LayoutError(
            f"{name}={unknown[name]!r:.60}: a factory of DTensors takes dtype, layout, requires_grad, "
            "device_mesh and placements; the mesh says the device"
        )
    if layout is not torch.strided:
        raise LayoutError(f"layout={layout!r:.60}: a factory of DTensors makes strided ones")
    mesh, dtype = current_mesh(device_mesh), torch.get_default_dtype() if dtype is None else dtype
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    given = (Replicate(),) * mesh.ndim if placements is None else placements
    resolved, order = resolve_placements(mesh, given, default="replicate")
    return Layout(mesh, resolved, shape, dtype=dtype, order=order), mesh


@of_constants
def _filled(size: tuple[Any, ...], value: Any, /, *, requires_grad: bool = False, **options: Any) -> DTensor:
    refuse_other_kind("requires_grad", requires_grad, bool, LayoutError, fix="True or False")
    layout, mesh = _layout(size, **options)
    coords = coords_of(mesh)
    if coords is None:
        local = torch.empty(0, dtype=layout.dtype, device=mesh.device_type)
    else:
        local = torch.empty(tuple(layout.local_shape(coords)), dtype=layout.dtype, device=mesh.device_type)
        if value is not None:
            local.fill_(value)
            for axis, placement in enumerate(layout.placements):
                if isinstance(placement, Pending):
                    local = placement.embed(local, mesh.size(axis), coords[axis])
    return wrap(local, spec_of(layout, mesh), requires_grad=requires_grad)


@_in_no_graph
def zeros(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Zeros of logical shape `size`; each rank makes its own part.

    Args:
        size: whole numbers, or one sequence of them.
        dtype: None: torch's default one.
        layout: `torch.strided`, the only one.
        requires_grad: whether it is a leaf that is given a gradient.
        device_mesh: None: that of the surrounding `with mesh:`.
        placements: one for each axis, or by name, `{"tp": Shard(0)}`, where axes that are not named hold
            copies. None: copies on every axis.
    Raises: LayoutError: no mesh, another `layout`, too many or too few placements, an axis that the mesh does
        not have; PlacementError: a placement that does not fit the shape.
    Cost: none.
    """
    return _filled(size, 0, **options)


@_in_no_graph
def ones(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Ones of logical shape `size`; each rank makes its own part. Args, raises, cost: see `zeros`."""
    return _filled(size, 1, **options)


@_in_no_graph
def empty(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Uninitialised memory of logical shape `size`, its own part on each rank; for the rest see `zeros`."""
    return _filled(size, None, **options)


@_in_no_graph
def full(size: Any, fill_value: Any, **options: Unpack[Options]) -> DTensor:
    """`fill_value` everywhere; each rank makes its own part.

    Args:
        size: a sequence of whole numbers.
        fill_value: a number, or a plain tensor without dims; without `dtype` the tensor has the dtype that
            torch gives it.
        options: as of `zeros`.
    Raises: as `zeros`.
    Cost: none.
    """
    kinds = (Number, torch.Tensor, torch.SymInt, torch.SymFloat)
    refuse_other_kind("full: fill_value", fill_value, kinds, LayoutError, fix="a number")
    if isinstance(fill_value, torch.Tensor) and (fill_value.ndim or isinstance(fill_value, TorchDTensor)):
        raise LayoutError(
            f"full: fill_value is a {type(fill_value).__name__} of shape {tuple(fill_value.shape)}\n"
            "  fix: a number: item() of one element"
        )
    if options.get("dtype") is None:
        options["dtype"] = torch.full((), fill_value).dtype
    return _filled((size,), fill_value, **options)


@of_constants
def _drawn(draw: Any, size: tuple[Any, ...], /, *, requires_grad: bool = False, **options: Any) -> DTensor:
    refuse_other_kind("requires_grad", requires_grad, bool, LayoutError, fix="True or False")
    layout, mesh = _layout(size, **options)
    with shared_stream(mesh, layout.placements, None):
        if mode.is_counter() and layout.dtype.is_floating_point:
            made = counter.standard(layout, mesh, normal=draw is torch.randn)
            return cast(DTensor, made.requires_grad_(requires_grad))
        whole = draw(layout.shape, dtype=layout.dtype, device=mesh.device_type)
    coords = coords_of(mesh)
    local = whole.new_empty(0) if coords is None else layout.split(whole, coords).clone()
    return wrap(local, spec_of(layout, mesh), requires_grad=requires_grad)


@_in_no_graph
def rand(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Uniform numbers, equal to one device's with the same seed whatever the placements.

    Every rank draws the whole tensor and keeps its part: time and transient memory of the full tensor. Inside
    `sw.random_mode("counter")` it draws its own part alone, from another generator.

    Args and raises: as of `zeros`; `dtype` is a floating-point or complex one.
    Cost: none, as long as the ranks' generators agree; where a context has parted them, see `shared_stream`.
    """
    return _drawn(torch.rand, size, **options)


@_in_no_graph
def randn(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Normal numbers, equal to one device's with the same seed whatever the placements.

    Args, raises, cost: see `rand`.
    """
    return _drawn(torch.randn, size, **options)
