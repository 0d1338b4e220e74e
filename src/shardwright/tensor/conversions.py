"""`from_local`: argument checks above, autograd functions below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.dtype import bits
from shardwright.comm.record import because
from shardwright.compat import mesh_resources, unwrap_if_dead
from shardwright.compat.symbols import has_symbols, hints
from shardwright.errors import LayoutError, refuse_other_kind
from shardwright.index.stride import contiguous_stride
from shardwright.layout.layout import Layout, as_lengths
from shardwright.placement.base import Partition, Placement, Replicate
from shardwright.tensor import known_parts
from shardwright.tensor.agreed import check_alike, check_stated, cut_by, refuse_unequal, told_by_all, whole_of
from shardwright.tensor.algorithms.declared_terms import FromTerms, is_declared
from shardwright.tensor.autograd import FromLocal, apply
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.graph_spec import of_sizes
from shardwright.tensor.placements import PlacementsArgument, gradient_layout, resolve_placements
from shardwright.tensor.plain.constants import of_constants
from shardwright.tensor.spec import coords_of, finished, spec_of


def current_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The given mesh, or the one of the surrounding `with mesh:` block. Raises: LayoutError: neither."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is not None:
        raise LayoutError(
            f"a {type(mesh).__name__} stands where the device mesh belongs: sw.init_device_mesh makes one"
        )
    try:
        return mesh_resources.get_current_mesh()
    except RuntimeError as error:
        raise LayoutError("no device mesh: pass one, or work inside `with mesh:`") from error


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: PlacementsArgument | None,
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: PlacementsArgument | None,
) -> DTensor:
    """See `DTensor.from_local`."""
    key: tuple[Any, ...] | None = None
    if not run_check and shape is None and stride is None and grad_placements is None:
        key = known_parts.key_of(local, mesh, placements)
        known = None if key is None else known_parts.parts.get(key)
        if known is not None:
            return known.adopt(local)
    made: DTensor = from_local_in_graph(
        local,
        mesh,
        *apart(placements),
        *apart(grad_placements),
        run_check=run_check,
        shape=shape,
        stride=stride,
    )
    if (
        key is not None
        and mesh is not None
        and coords_of(mesh) is not None
        and not is_declared(made._spec.layout)
    ):
        known_parts.learn(key, mesh, made)
    return made


_Apart = tuple[Sequence[str] | None, Any]


def apart(given: PlacementsArgument | None) -> _Apart:
    """Names and placements of a mapping: a graph can write down placements in a list, not in a dict."""
    return (list(given), list(given.values())) if isinstance(given, Mapping) else (None, given)


def together(names: Sequence[str] | None, given: Any) -> PlacementsArgument | None:
    """The argument again that `apart` took apart."""
    argument: PlacementsArgument | None = given if names is None else dict(zip(names, given, strict=True))
    return argument


@of_constants
def from_local_in_graph(
    local: torch.Tensor,
    mesh: DeviceMesh | None,
    names: Sequence[str] | None,
    values: Any,
    grad_names: Sequence[str] | None,
    grad_values: Any,
    *,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> DTensor:
    """`DTensor.from_local` with arguments that a graph can write down."""
    if isinstance(local, TorchDTensor) or not isinstance(local, torch.Tensor):
        raise LayoutError(
            f"from_local takes the plain tensor of this rank, and was given a {type(local).__name__}\n"
            "  fix: redistribute moves a DTensor; to_local() is this rank's part of it"
        )
    if local.layout is not torch.strided:
        raise LayoutError(f"from_local takes a dense tensor, was given a {local.layout}: to_dense()")
    placements, grad_placements = together(names, values), together(grad_names, grad_values)
    mesh = current_mesh(mesh)
    given = (Replicate(),) * mesh.ndim if placements is None else placements
    resolved, order = resolve_placements(mesh, given, default="error")
    refuse_other_kind("from_local: run_check", run_check, bool, LayoutError, fix="True or False")
    if shape is None and stride is None and not run_check and has_symbols(local.shape):
        return _from_symbols(local, mesh, resolved, order, grad_placements)
    shape, stride = _logical(shape, stride)
    if run_check and coords_of(mesh) is not None:
        _agree(local, mesh, resolved, shape, stride, order)
    if shape is None:
        layout = inferred_layout(local, mesh, resolved)
    else:
        layout = Layout(mesh, resolved, shape, dtype=local.dtype, stride=stride)
    if order is not None:
        layout = layout.with_placements(resolved, order=order)
    coords = coords_of(mesh)
    if coords is None:
        local = local.new_empty(0, requires_grad=local.requires_grad)
    else:
        _check_shape(local, layout, mesh, coords)
        if run_check:
            local = _same_on_replicas(local, mesh, layout)
    if grad_placements is None and local.requires_grad and coords is not None and is_declared(layout):
        return apply(FromTerms, unwrap_if_dead(local), layout, mesh)
    grad_layout = finished(layout)
    if grad_placements is not None:
        grad_layout = gradient_layout(mesh, layout, grad_placements, default="error")
    return apply(FromLocal, unwrap_if_dead(local), layout, mesh, grad_layout)


def _from_symbols(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: Sequence[str] | None,
    grad_placements: PlacementsArgument | None,
) -> DTensor:
    """As `from_local_in_graph`, of a part whose sizes are symbols of the graph: of them so many times."""
    own = hints(local.shape)
    example = torch.empty_strided(own, hints(local.stride()), dtype=local.dtype, device="meta")
    layout = inferred_layout(example, mesh, placements)
    if order is not None:
        layout = layout.with_placements(placements, order=order)
    times = [whole // part if part else 1 for whole, part in zip(layout.shape, own, strict=True)]
    sizes = tuple(size * n for size, n in zip(local.shape, times, strict=True))
    spec = of_sizes(spec_of(layout, mesh), sizes)
    grad_layout = finished(layout)
    if grad_placements is not None:
        grad_layout = gradient_layout(mesh, layout, grad_placements, default="error")
    return apply(FromLocal, unwrap_if_dead(local), spec, mesh, grad_layout)


def _logical(shape: Sequence[int] | None, stride: Sequence[int] | None) -> tuple[Any, Any]:
    """Shape and stride of the logical tensor, row-major where only the shape is stated."""
    if shape is None:
        if stride is not None:
            raise LayoutError(f"from_local: stride={stride!r:.60} without a shape\n  fix: pass shape= too")
        return None, None
    lengths = as_lengths("shape", shape)
    return lengths, contiguous_stride(lengths) if stride is None else as_lengths("stride", stride)


def _agree(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    order: Sequence[str] | None,
) -> None:
    """Refuse, on all ranks alike and before anything is sent, what is not one tensor's parts."""
    what = "DTensor.from_local(run_check=True)"
    # Logical strides that nobody states are those of the part: where they differ, ranks view differently.
    lies = tuple(stride or sorted(range(local.dim()), key=local.stride().__getitem__, reverse=True))
    told = told_by_all(local, mesh, (placements, shape, lies, order, local.requires_grad), what)
    check_alike(told, what)
    if shape is not None:
        layout = Layout(mesh, placements, shape, dtype=local.dtype, stride=stride, order=order)
        return check_stated(told, layout, what)
    guesses = [
        inferred_layout(torch.empty(held.shape, device="meta"), mesh, placements).shape for held in told
    ]
    if len(set(guesses)) > 1:
        refuse_unequal(told, guesses, whole_of(told, mesh, placements, local.dtype), what)
    return None


def inferred_layout(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[object]) -> Layout:
    """The layout in which every rank holds a part of this shape: each cut dim is n times as long.

    Raises: LayoutError: a placement that does not cut exactly one dim; then the logical shape must be given.
    """
    shape = list(local.shape)
    stride = list(local.stride())
    for axis, placement in reversed(list(enumerate(placements))):
        if not isinstance(placement, Partition):
            continue
        size = mesh.size(axis)
        dim = cut_by(placement, tuple(shape), size)
        if dim is None:
            raise LayoutError(
                f"from_local cannot infer the logical shape under {placement}: pass shape=\n"
                f"  local  {tuple(local.shape)} on this rank\n"
                "  fix: from_local(..., shape=(...)), that of the whole tensor"
            )
        shape[dim] *= size
        stride = [s * size if s > stride[dim] and i != dim else s for i, s in enumerate(stride)]
    return Layout(mesh, tuple(placements), tuple(shape), dtype=local.dtype, stride=tuple(stride))


def _check_shape(local: torch.Tensor, layout: Layout, mesh: DeviceMesh, coords: tuple[int, ...]) -> None:
    expected = tuple(layout.local_shape(coords))
    if tuple(local.shape) != expected:
        raise LayoutError(
            f"local tensor of shape {tuple(local.shape)} on coords {coords}, but {layout} gives this rank "
            f"{expected}: pass the part that belongs here, or the right shape=\n"
            f"  {_way_out(local, layout, mesh, coords)}"
        )


def _way_out(local: torch.Tensor, layout: Layout, mesh: DeviceMesh, coords: tuple[int, ...]) -> str:
    """What would take this local tensor, tried on the layout that it makes."""
    if tuple(local.shape) == layout.shape:
        return "fix (checked): sw.distribute_tensor(local, mesh, placements): this is the whole tensor"
    try:
        inferred = inferred_layout(local, mesh, layout.placements)
    except LayoutError:
        inferred = layout
    if inferred.local_shape(coords) == tuple(local.shape):
        return f"fix (checked here): shape={inferred.shape}, if every rank has a part of this shape"
    return "fix: a logical shape of which these placements give this rank such a part"


def broadcast(x: torch.Tensor, ways: Sequence[tuple[int, dist.ProcessGroup]]) -> torch.Tensor:
    """What the root has, in the memory order of `x`, along group after group; `x` itself without any."""
    if not ways:
        return x
    result = x.detach().contiguous().clone()
    for root, group in ways:
        dist.broadcast(bits(result.view(-1)), root, group)
    return result if x.is_contiguous() else torch.empty_like(x).copy_(result)


def _same_on_replicas(local: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> torch.Tensor:
    """The values of the first rank of every replicated axis, with the gradient of `local`."""
    groups = [mesh.get_group(axis) for axis, p in enumerate(layout.placements) if p.is_replicated]
    with because("from_local(run_check=True)"):
        told = broadcast(local, [(dist.get_global_rank(group, 0), group) for group in groups])
    result = local.clone()
    with torch.no_grad():
        return result.copy_(told)
