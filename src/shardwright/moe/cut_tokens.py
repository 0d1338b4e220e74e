"""Tokens that are DTensors, cut over ranks that the experts are spread over: each rank takes its own."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.compat import on_axes
from shardwright.errors import ConfigError
from shardwright.layout.mesh_shape import ranks_of
from shardwright.placement.base import Partition, Placement, Replicate
from shardwright.placement.shard import Shard
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.local_use import kept_spec
from shardwright.tensor.wrap import as_ours


def computes_locally(parameter: TorchDTensor) -> bool:
    """Does the computation see its local tensor, and nothing distributed?"""
    return kept_spec(as_ours(parameter)._spec) is None


def placed_on(experts: Tensor) -> frozenset[int]:
    """The ranks that the experts are placed over; none of a plain tensor, which says nothing."""
    return ranks_of(experts.device_mesh) if isinstance(experts, TorchDTensor) else frozenset()


def cut_by_tokens(x: TorchDTensor, shared: AbstractSet[int]) -> DTensor:
    """The tokens, each whole and on one of the ranks that the experts are placed over:  [..., dim].

    Ranks of other axes (tensor parallel) hold the same tokens and compute the same.

    Args: shared: the ranks of the experts.
    """
    ours = as_ours(x) if not isinstance(x, DTensor) else x
    if x.ndim < 2:
        raise ConfigError(f"tokens of a MoELayer are [..., dim], got {ours._spec.layout}")
    layout = ours._spec.layout
    wanted = {
        axis: _wanted(placement, ours, axis, is_shared=ranks_of(on_axes(x.device_mesh, (axis,))) <= shared)
        for axis, placement in zip(layout.axes, layout.placements, strict=True)
    }
    if all(wanted[axis] == p for axis, p in zip(layout.axes, layout.placements, strict=True)):
        return ours
    moved: DTensor = ours.redistribute(wanted)
    return moved


def _wanted(placement: Placement, x: DTensor, axis: str, *, is_shared: bool) -> Placement:
    if not is_shared:
        return Replicate()
    if isinstance(placement, Partition):
        cut = placement.cut_dims(tuple(x.shape), on_axes(x.device_mesh, (axis,)).size())
        if x.ndim - 1 not in cut:
            return placement
    return Shard(0)


def rows_of(tokens: DTensor, part: Tensor) -> Tensor:
    """Of what was computed for all tokens in turn, the rows of this rank's:  [T, k] -> [local T, k]."""
    width = part.shape[-1]
    placed: DTensor = as_ours(part.view(*tokens.shape[:-1], width)).redistribute(placements=tokens.placements)  # type: ignore[arg-type]  # a DTensor, as the tokens are
    return placed.to_local().reshape(-1, width)


def as_part_of(tokens: DTensor, local: Tensor) -> DTensor:
    """This rank's results, one row for each of its tokens, in the layout of the tokens."""
    shape = tuple(tokens._local_tensor.shape)
    made: DTensor = DTensor.from_local(
        local.view(shape),
        tokens.device_mesh,
        tokens.placements,
        run_check=False,
        shape=tokens.shape,
        stride=tokens.stride(),
    )
    return made
