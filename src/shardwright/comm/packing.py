"""Local tensors into wire buffers and back, by strided views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.plan.strided import Strided
from shardwright.plan.transfer import Memory, Transfer


def in_memory(x: Tensor, memory: Memory) -> Tensor:
    """`x` with the stride that views of it count on; a copy only if it has another.

    Strides of dims of length 1, and of a tensor without elements, do not matter.
    """
    if _lies_so(x, memory):
        return x
    return new_tensor(x, memory).copy_(x)


def new_tensor(like: Tensor, memory: Memory) -> Tensor:
    """An uninitialised tensor that lies as `memory` says."""
    return torch.empty_strided(memory.shape, memory.stride, dtype=like.dtype, device=like.device)


def _lies_so(x: Tensor, memory: Memory) -> bool:
    stride = x.stride()
    if stride == memory.stride or memory.numel == 0:
        return True
    return all(
        size == 1 or mine == wanted
        for size, mine, wanted in zip(memory.shape, stride, memory.stride, strict=True)
    )


def flat_memory(x: Tensor, memory: Memory) -> Tensor:
    """The memory of `x`, which lies as `memory` says, as one flat view."""
    return x.as_strided((memory.numel,), (1,), x.storage_offset())


def shaped(flat: Tensor, memory: Memory) -> Tensor:
    """The reverse of `flat_memory`."""
    return flat.as_strided(memory.shape, memory.stride, flat.storage_offset())


def view_of(x: Tensor, view: Strided) -> Tensor:
    """A strided view of the memory of `x`; `start` counts from its first element."""
    return x.as_strided(view.size, view.stride, x.storage_offset() + view.start)


def pack(x: Tensor, table: Transfer) -> Tensor:
    """The elements to send, member by member, flat; no copy when they are all of `x` in order."""
    if table.send_whole:
        return flat_memory(x, table.source)
    return _joined(x, [view for views in table.send for view in views])


def pack_once(x: Tensor, table: Transfer, member: int) -> Tensor:
    """As `pack`, for one member only."""
    if table.send_whole:
        return flat_memory(x, table.source)
    return _joined(x, table.send[member])


def _joined(x: Tensor, views: Sequence[Strided]) -> Tensor:
    if not views:
        return x.new_empty(0)
    pieces = [view_of(x, view).reshape(-1) for view in views]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def unpack(received: Tensor, x: Tensor, table: Transfer) -> Tensor:
    """The result from what arrived, member by member in one flat buffer, and from what `x` holds already."""
    if table.receive_whole:
        return shaped(received, table.target)
    out = new_tensor(x, table.target)
    move(x, out, table.keep)
    position = 0
    for view in (view for views in table.receive for view in views):
        piece = received[position : position + view.numel]
        view_of(out, view).copy_(piece.view(view.size))
        position += view.numel
    return out


def move(x: Tensor, out: Tensor, pairs: Sequence[tuple[Strided, Strided]]) -> None:
    """Copy views of `x` to views of `out`."""
    for source, target in pairs:
        view_of(out, target).copy_(view_of(x, source))
