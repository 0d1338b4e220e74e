"""What of a tensor this rank holds: boxes of the logical tensor, each with a view of the local one."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardwright.checkpoint.agree import rank as this_rank
from shardwright.checkpoint.storage.element_types import name_of
from shardwright.compat import DisableTorchFunctionSubclass, increment_versions
from shardwright.errors import CheckpointError
from shardwright.index.boxes import Chunk, chunks_of
from shardwright.index.region import Box
from shardwright.layout.layout import Layout
from shardwright.layout.of_tensor import layout_of
from shardwright.remember import remembered
from shardwright.tensor.views.write_back import is_copy

Shape = tuple[int, ...]
Cell = tuple[Shape, Shape]  # offset and size


class Held(NamedTuple):
    """A tensor as one rank describes it to the others: no data.

    Args: layout: its text, for people; None: a plain tensor, of which every rank has the whole.
        ranks: those of the mesh that the tensor is on, sorted; empty for a plain one.
    """

    dtype: str
    shape: Shape
    layout: str | None
    boxes: tuple[Cell, ...]
    ranks: Shape = ()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, to be looked at: it may have a graph."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The storage that this rank holds of a tensor, detached; writing into it writes into the tensor."""
    return part_of(tensor).detach()


def note_written(tensors: Iterable[torch.Tensor]) -> None:
    """Tell autograd that tensors were written by other means than ops on them.

    A backward of an earlier forward, which may have saved them or their parts, then raises as torch's does.
    """
    written = [each for one in tensors for each in (one, part_of(one))]
    with DisableTorchFunctionSubclass():  # else a question to a DTensor costs ten times as much
        increment_versions([one for one in written if not one.is_inference()])


def describe(tensor: torch.Tensor, key: str, rank: int) -> Held:
    """What of a tensor a rank, this one, holds.

    Raises: CheckpointError: it is still to be summed, has no data, or is of a kind that no file holds.
    """
    if not isinstance(tensor, DTensor):
        refuse_without_data(tensor, key)
        shape = tuple(tensor.shape)
        whole: tuple[Cell, ...] = (((0,) * len(shape), shape),) if tensor.numel() else ()
        return Held(name_of(tensor.dtype), shape, None, whole)
    _refuse_pending(tensor, key)
    _refuse_copied_view(tensor, key)
    held = _held(layout_of(tensor), rank)
    if held.boxes:
        refuse_without_data(part_of(tensor), key)
    return held


@remembered(4096)
def _held(layout: Layout, rank: int) -> Held:
    """One object for all tensors of a layout: it is pickled once, and compared by identity."""
    boxes = tuple((chunk.box.offset, chunk.box.size) for chunk in _chunks_of(layout, rank))
    return Held(name_of(layout.dtype), layout.shape, _text(layout), boxes, tuple(sorted(layout.ranks)))


def is_copied(tensor: torch.Tensor) -> bool:
    """Whether ranks of its mesh hold the same elements of a DTensor."""
    return isinstance(tensor, DTensor) and _is_copied(layout_of(tensor))


@remembered(4096)
def _is_copied(layout: Layout) -> bool:
    return any(n > 1 and not p.is_partition for n, p in zip(layout.sizes, layout.placements, strict=True))


def _refuse_copied_view(tensor: DTensor, key: str) -> None:
    if is_copy(tensor):
        raise CheckpointError(
            f"{key} is a view whose part on this rank is a copy of what it shows, since its base is cut "
            "across it: give the base, or save its clone()"
        )


def _refuse_pending(tensor: DTensor, key: str) -> None:
    if layout_of(tensor).pending_axes:
        fix = "reduce it first (redistribute it to Replicate or Shard)"
        raise CheckpointError(f"{key} with placements {tensor.placements} is not finished: {fix}")


def refuse_without_data(local: torch.Tensor, key: str) -> None:
    """Raises CheckpointError where a tensor has no elements that a file holds; `key` is its name."""
    if local.is_meta:
        raise CheckpointError(f"{key} is on the meta device and has no data: materialize the module first")
    if local.is_nested:
        raise CheckpointError(f"{key} is a nested tensor: save its values and its offsets")
    if local.layout != torch.strided:
        raise CheckpointError(f"{key} is {local.layout}: make it dense first (x.to_dense())")
    if local.is_quantized:
        raise CheckpointError(f"{key} is quantized: save its integers and its scales")
    if local.numel() and not _has_memory(local):
        raise CheckpointError(
            f"{key} is a {type(local).__name__} {list(local.shape)} that has no memory of its own: give the "
            "tensors that it is made of, or, where its storage was freed, bring that back first"
        )


def _has_memory(local: torch.Tensor) -> bool:
    """Whether elements lie in memory: not where a class wraps other tensors, or a storage was freed."""
    try:
        return local.untyped_storage().data_ptr() != 0
    except RuntimeError:  # what wraps others has a storage in name only
        return False


def refuse_unwritable(tensor: torch.Tensor, key: str, *, made: bool = False) -> None:
    """Raises CheckpointError where nothing can be copied: no memory, or sums.

    Args: made: its memory is yet to be made.
    """
    local = tensor
    if isinstance(tensor, DTensor):
        _refuse_pending(tensor, key)
        _refuse_copied_view(tensor, key)
        local = tensor._local_tensor
    if not made:
        refuse_without_data(local, key)


@remembered(4096)
def _chunks_of(layout: Layout, rank: int) -> tuple[Chunk, ...]:
    if rank not in layout.ranks:
        return ()
    return chunks_of(layout.region(layout.coords_of(rank)))


@remembered(4096)
def _text(layout: Layout) -> str:
    return str(layout)


def views(
    tensor: torch.Tensor, local: torch.Tensor, *, copies: bool = False, rank: int | None = None
) -> list[tuple[Box, torch.Tensor]]:
    """Each box that this rank holds with its elements in `local`, a tensor of the local shape: views.

    Args:
        rank: this one, where it is known: to ask for it costs as much as all else here.
        copies: only to be read: a box that no view of `local` shows may be a copy. Without it, that is a
            RuntimeError, because what is written into a copy is lost.
    """
    if not isinstance(tensor, DTensor):
        return [(Box((0,) * local.dim(), tuple(local.shape)), local)] if local.numel() else []
    found = _chunks_of(layout_of(tensor), this_rank() if rank is None else rank)
    if len(found) == 1 and found[0].inside is not None and found[0].inside.size == local.shape:
        return [(found[0].box, local)]
    return [(chunk.box, _view(chunk, local, copies)) for chunk in found]


def _view(chunk: Chunk, local: torch.Tensor, copies: bool) -> torch.Tensor:
    if chunk.inside is None and not local.is_contiguous():
        flat = local.reshape(-1) if copies else local.view(-1)
        return flat.narrow(0, chunk.start, prod(chunk.box.size)).view(chunk.box.size)
    return chunk.view(local)
