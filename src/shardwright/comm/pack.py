"""Local tensors into wire buffers and back, by strided views."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from shardwright.compat import records_a_graph
from shardwright.index.overlap import Strided
from shardwright.plan.work import Memory


def in_memory(x: Tensor, memory: Memory) -> Tensor:
    """`x` with the stride that views of it count on; a copy only if it has another.

    Strides of dims of length 1, and of a tensor without elements, do not matter. In a graph a tensor that was
    written says how it lay before: what torch computes in place of a write may lie as its rows do.
    """
    lies_so = x.stride() == memory.stride or _lies_so(x, memory)
    if lies_so and (x.is_contiguous() or not records_a_graph()):
        return x
    return new_tensor(x, memory).copy_(x)


def new_tensor(like: Tensor, memory: Memory) -> Tensor:
    """An uninitialised tensor that lies as `memory` says."""
    return like.new_empty_strided(memory.shape, memory.stride)


def _lies_so(x: Tensor, memory: Memory) -> bool:
    return memory.numel == 0 or all(
        size == 1 or mine == wanted
        for size, mine, wanted in zip(memory.shape, x.stride(), memory.stride, strict=True)
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


def joined(x: Tensor, views: Sequence[Strided]) -> Tensor:
    """The elements of some views, one after the other, flat; each is copied once."""
    if len(views) == 1:
        return view_of(x, views[0]).reshape(-1).contiguous()
    counts = [prod(view.size) for view in views]
    pieces = x.new_empty(sum(counts))
    position, start = 0, x.storage_offset()
    for view, count in zip(views, counts, strict=True):
        piece = pieces[position : position + count].view(view.size)
        piece.copy_(x.as_strided(view.size, view.stride, start + view.start))
        position += count
    return pieces


def copy_in(flat: Tensor, out: Tensor, views: Sequence[Strided]) -> None:
    """The reverse of `joined`: write flat elements to views of `out`."""
    position, start = 0, out.storage_offset()
    for view in views:
        count = prod(view.size)
        piece = flat[position : position + count].view(view.size)
        out.as_strided(view.size, view.stride, start + view.start).copy_(piece)
        position += count


def move(x: Tensor, out: Tensor, pairs: Sequence[tuple[Strided, Strided]]) -> None:
    """Copy views of `x` to views of `out`."""
    for source, target in pairs:
        view_of(out, target).copy_(view_of(x, source))
