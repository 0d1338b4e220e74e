"""What torch's distributed checkpoint asks of a DTensor: which boxes of the tensor this rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwright.compat import saves_for_hugging_face
from shardwright.errors import LayoutError
from shardwright.index.boxes import Chunk, chunks_of
from shardwright.index.region import Box

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardwright.layout.layout import Layout
    from shardwright.tensor.spec import Spec


def refuse_pending(layout: Layout) -> None:
    """Raise LayoutError for a tensor that is not finished."""
    if any(p.is_pending for p in layout.placements):
        raise LayoutError(f"{layout} is not finished; redistribute it before saving")


def _chunks(spec: Spec) -> tuple[Chunk, ...]:
    """The boxes that this rank holds, with their places in the local tensor.

    Of a tensor without elements every rank has the whole, for torch knows nothing of a tensor without boxes.

    Raises: LayoutError: the tensor is not finished.
    """
    refuse_pending(spec.layout)
    if spec.coords is None:
        return ()
    shape = tuple(spec.layout.shape)
    if 0 in shape:
        return (Chunk(Box((0,) * len(shape), shape), None, 0),)
    return chunks_of(spec.layout.region(spec.coords))


def chunk_list(spec: Spec) -> list[ChunkStorageMetadata]:
    """One chunk per box: offsets and sizes in the logical tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: PLC0415 - who saves pays

    return [
        ChunkStorageMetadata(offsets=torch.Size(c.box.offset), sizes=torch.Size(c.box.size))
        for c in _chunks(spec)
    ]


def write_items(spec: Spec, local: torch.Tensor, fqn: str) -> list[WriteItem]:
    """One item to write per box.

    Raises: LayoutError: the tensor is not finished; or several boxes, for a writer that would keep one.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties  # noqa: PLC0415
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415

    chunks = chunk_list(spec)
    if len(chunks) > 1 and saves_for_hugging_face():
        raise LayoutError(
            f"{fqn}: {spec.layout} holds {len(chunks)} boxes on this rank, of which torch's "
            "HuggingFaceStorageWriter would keep the last\n  fix: shardwright.checkpoint.save_hf"
        )
    properties, size = TensorProperties.create_from_tensor(local), torch.Size(spec.layout.shape)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in chunks
    ]


def shard_of(spec: Spec, local: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """The part of `local` that is the box at `index.offset`: a view, so loading writes into it.

    Raises: LayoutError: this rank holds no such box, or several and no offset says which.
    """
    found = [c for c in _chunks(spec) if index.offset in (None, c.box.offset)]
    if len(found) != 1:
        at = "" if index.offset is None else f" at offset {tuple(index.offset)}"
        raise LayoutError(f"{index.fqn}: {spec.layout} holds {len(found)} boxes on this rank{at}, not one")
    return found[0].view(local)
