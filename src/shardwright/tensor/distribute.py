"""`distribute_tensor`: one logical tensor becomes a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm import guard
from shardwright.comm.dtype import bits
from shardwright.comm.record import because
from shardwright.compat.dynamo import never_traced
from shardwright.errors import LayoutError
from shardwright.layout.applied import Applied
from shardwright.layout.layout import Layout
from shardwright.placement.base import Replicate
from shardwright.placement.shard import Shard
from shardwright.tensor.conversions import broadcast, current_mesh
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.placements import PlacementsArgument, resolve_placements
from shardwright.tensor.plain.constants import of_constants
from shardwright.tensor.spec import coords_of, spec_of
from shardwright.tensor.wrap import as_ours, wrap

# From so many ranks on, and up to so many bytes for each, what takes the time is one that sends all parts:
# 1,023 messages of 16 bytes, where a broadcast is ten rounds.
_MANY = 64
_LITTLE = 256


@never_traced(
    "distribute_tensor sends from one rank, which no graph holds; fix: call it before what is compiled and "
    "pass its result in, or inside DTensor.from_local of each rank's own part"
)
@of_constants
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: PlacementsArgument | None = None,
    *,
    src_data_rank: int | None = 0,
    order: tuple[str, ...] | None = None,
) -> DTensor:
    """A leaf DTensor with the values of `tensor`.

    Args:
        tensor: the whole logical tensor on every rank (of `src_data_rank` the values count, of all others
            shape and dtype, which must be the same); a DTensor of this very layout passes through.
        placements: one per axis, or `{axis name: placement}`; axes not named: Replicate.
        src_data_rank: index on each axis of the rank whose data counts; None: each rank's own; sends nothing.
        order: axes in order of application, if not left to right.
    Raises: LayoutError: no tensor or mesh, wrong count, unknown axis or rank, dim out of range, a DTensor of
        another layout, a tensor that a transform of `torch.func` follows.
    Cost: per axis that cuts it a scatter, of which a rank receives its part only, per other axis a broadcast
        of what is left; a broadcast too where 64 ranks or more would get 256 bytes each or less. None with
        `src_data_rank=None`, and none of a meta tensor, whose parts are meta tensors too (place, `to_empty`,
        initialise: the start of a model too large for a rank). That the ranks ask for the same is not
        compared, for no rank hears of the others here and it would cost as much again: `sw.guarded()` does,
        as `sw.distribute_module` and the strategies do once for a whole module.
    """
    mesh = current_mesh(device_mesh)
    if not issubclass(type(tensor), torch.Tensor):
        verb = "sw.distribute_module" if issubclass(type(tensor), nn.Module) else "torch.as_tensor first"
        raise LayoutError(f"distribute_tensor takes a tensor, was given a {type(tensor).__name__}: {verb}")
    if not (tensor.is_leaf or isinstance(tensor, TorchDTensor)):
        raise LayoutError("distribute_tensor can distribute leaf tensors only; use DTensor.from_local")
    if tensor.layout is not torch.strided:
        raise LayoutError(f"distribute_tensor takes a dense tensor, was given a {tensor.layout}: to_dense()")
    if tensor.is_quantized:
        raise LayoutError("distribute_tensor takes plain numbers, was given a quantized tensor: dequantize()")
    refuse_source(mesh, src_data_rank)
    given = (Replicate(),) * mesh.ndim if placements is None else placements
    resolved, stated = resolve_placements(mesh, given, default="replicate")
    stride, order = tuple(tensor.stride()), stated if order is None else order
    layout = Layout(mesh, resolved, tuple(tensor.shape), dtype=tensor.dtype, stride=stride, order=order)
    if isinstance(tensor, TorchDTensor):
        return _already(as_ours(tensor), mesh, layout)
    coords = coords_of(mesh)
    if coords is None:
        return wrap(tensor.new_empty(0), spec_of(layout, mesh), requires_grad=tensor.requires_grad)
    full = tensor.detach() if tensor.is_meta else tensor.detach().to(mesh.device_type)
    if src_data_rank is None or full.is_meta or mesh.size() == 1:
        local = own_part(full, layout, coords)
    else:
        if guard.on:
            source = f"from rank {src_data_rank} of each axis"
            guard.compare_words(f"distribute_tensor to {layout} {source}", layout.mesh_shape.ranks)
        local = _from_source(full, layout, mesh, coords, src_data_rank)
    return wrap(local.detach(), spec_of(layout, mesh), requires_grad=tensor.requires_grad)


def refuse_source(mesh: DeviceMesh, rank: object) -> None:
    """Raises: LayoutError: no rank of each axis has this index, whose values should count."""
    if rank is None:
        return
    n = min(mesh.shape)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < n:
        raise LayoutError(f"src_data_rank is {rank!r:.60}: on each axis there are the ranks 0 to {n - 1}")


def own_part(full: torch.Tensor, layout: Layout, coords: tuple[int, ...]) -> torch.Tensor:
    """The part of `full` that belongs on these coords: dense, and not keeping the whole alive."""
    return _apart(layout.split(full, coords), full)


def _apart(local: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    shares = local.untyped_storage()._cdata == full.untyped_storage()._cdata
    return local.clone() if shares and local.numel() < full.numel() else local


def _from_source(
    full: torch.Tensor, layout: Layout, mesh: DeviceMesh, coords: tuple[int, ...], source: int
) -> torch.Tensor:
    """This rank's part of what the source has, along one axis after another.

    Replicated axes are the last, so that only parts go along them. Ranks that the values reach along a later
    axis send nothing before.
    """
    groups = {axis: mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1}
    lines = {axis: layout.mesh_shape.line(coords, axis) for axis in groups}
    later = set(groups)
    for step in sorted(layout.applied, key=lambda step: step.placement.is_replicated):
        coord, axes = step.coord(coords), later.intersection(step.axes)
        later -= axes
        ways = [(lines[a][source], groups[a]) for a in axes]
        if any(coords[axis] != source for axis in later):
            ways = []
        with because("distribute_tensor"):
            if step.partition is not None and len(ways) == 1 and not _little_for_many(full, step):
                full = _scattered(full, step, coord, lines[axes.pop()], *ways[0])
            else:
                whole = broadcast(full, ways)
                full = _apart(step.split(whole, coord), whole)
    return full


def _little_for_many(full: torch.Tensor, step: Applied) -> bool:
    """Whether one rank would send many messages that hold next to nothing: a tree brings all of it sooner."""
    return step.size >= _MANY and full.nbytes <= _LITTLE * step.size


def _scattered(
    full: torch.Tensor, step: Applied, coord: int, line: list[int], root: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """This coord's piece of the root's tensor. Backends scatter rows of one length: that of the longest."""
    mine, shape = torch.empty_like(step.split(full, coord)), tuple(full.shape)
    coords = (coord,) if step.even(shape) else range(step.size)
    longest = max(prod(step.local_shape(shape, c)) for c in coords)
    run, rows = full.new_empty(longest), None
    if dist.get_rank() == root:
        pieces = dict(zip(line, _pieces(full, step), strict=True))
        rows = [bits(_row(pieces[rank], longest)) for rank in dist.get_process_group_ranks(group)]
    if longest:
        dist.scatter(bits(run), rows, root, group)
    return mine.copy_(run[: mine.numel()].view(mine.shape))


def _pieces(full: torch.Tensor, step: Applied) -> Sequence[torch.Tensor]:
    """Those of all coords, of values as they lie in memory: that is what is sent."""
    values, cut = full.resolve_conj().resolve_neg(), step.partition
    if type(cut) is Shard and step.even(tuple(full.shape)):
        return values.chunk(step.size, cut.dim)  # a thousand calls in one
    return [step.split(values, coord) for coord in range(step.size)]


def _row(piece: torch.Tensor, length: int) -> torch.Tensor:
    """The elements one after another: a view where they lie so and fill the length."""
    flat = piece.contiguous().view(-1)
    return flat if len(flat) == length else torch.cat([flat, flat.new_empty(length - len(flat))])


def _already(x: DTensor, mesh: DeviceMesh, asked: Layout) -> DTensor:
    if x.device_mesh != mesh or not x._spec.layout.is_placed_as(asked):
        raise LayoutError(
            f"the tensor is already distributed as {x._spec.layout}; use redistribute to move it to a "
            "different device mesh, or to a different placements"
        )
    return x
