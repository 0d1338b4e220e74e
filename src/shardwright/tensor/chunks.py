"""What torch's distributed checkpoint asks of a DTensor: which boxes of the tensor this rank holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwright.errors import LayoutError
from shardwright.tensor.spec import coords_of

if TYPE_CHECKING:
    from shardwright.tensor.dtensor import DTensor


def _boxes(x: DTensor) -> list[Any]:
    """The non-empty boxes of this rank's region, in local order. Raises: LayoutError: x is not finished."""
    x._raise_if_contains_partial_placements()
    coords = coords_of(x.device_mesh)
    if coords is None:
        return []
    return [box for box in x.layout.region(coords).boxes if 0 not in box.size]


def chunk_list(x: DTensor) -> list[ChunkStorageMetadata]:
    """One chunk per box: offsets and sizes in the logical tensor."""
    return [
        ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.size)) for box in _boxes(x)
    ]


def write_items(x: DTensor, fqn: str) -> list[WriteItem]:
    """One item to write per box."""
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk, properties=TensorProperties.create_from_tensor(x.to_local()), size=x.size()
            ),
        )
        for chunk in chunk_list(x)
    ]


def shard_of(x: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The part of the local tensor that is the box at `index.offset`: a view, so loading writes into it."""
    boxes = _boxes(x)
    local = x._local_tensor
    if index.offset is None:
        if len(boxes) == 1:
            return local.view(boxes[0].size) if local.is_contiguous() else local
        raise LayoutError(
            f"{index.fqn}: {x.layout} holds {len(boxes)} boxes on this rank; an offset must say which"
        )
    start = 0
    for box in boxes:
        if tuple(box.offset) == tuple(index.offset):
            return _view_of_box(local, boxes, start, box.size)
        start += math.prod(box.size)
    raise LayoutError(f"{index.fqn}: no box at offset {tuple(index.offset)} on this rank of {x.layout}")


def _view_of_box(local: torch.Tensor, boxes: list[Any], start: int, size: tuple[int, ...]) -> torch.Tensor:
    if len(boxes) == 1 and tuple(local.shape) == tuple(size):
        return local
    if not local.is_contiguous():
        raise LayoutError("a non-contiguous local tensor of several boxes has no view per box")
    return local.view(-1).narrow(0, start, math.prod(size)).view(size)
