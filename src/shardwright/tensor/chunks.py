"""What torch's distributed checkpoint asks of a DTensor: which boxes of the tensor this rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwright.errors import LayoutError
from shardwright.index.boxes import Chunk, chunks_of

if TYPE_CHECKING:
    from shardwright.tensor.dtensor import DTensor


def _chunks(x: DTensor) -> tuple[Chunk, ...]:
    """The boxes that this rank holds, with their places in the local tensor.

    Raises: LayoutError: x is not finished.
    """
    x._raise_if_contains_partial_placements()
    coords = x._spec.coords
    return () if coords is None else chunks_of(x._spec.layout.region(coords))


def chunk_list(x: DTensor) -> list[ChunkStorageMetadata]:
    """One chunk per box: offsets and sizes in the logical tensor."""
    return [
        ChunkStorageMetadata(offsets=torch.Size(c.box.offset), sizes=torch.Size(c.box.size))
        for c in _chunks(x)
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
    """The part of the local tensor that is the box at `index.offset`: a view, so loading writes into it.

    Raises: LayoutError: this rank holds no such box, or several and no offset says which.
    """
    chunks = _chunks(x)
    if index.offset is None:
        if len(chunks) != 1:
            raise LayoutError(
                f"{index.fqn}: {x._spec.layout} holds {len(chunks)} boxes on this rank; "
                "an offset must say which"
            )
        return chunks[0].view(x._local_tensor)
    for chunk in chunks:
        if tuple(chunk.box.offset) == tuple(index.offset):
            return chunk.view(x._local_tensor)
    raise LayoutError(f"{index.fqn}: no box at offset {tuple(index.offset)} on this rank of {x._spec.layout}")
