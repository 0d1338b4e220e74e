"""Local tensors into wire buffers and back, by strided views."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import gcd, prod

import torch
from torch import Tensor

from shardwright.compat import records_a_graph
from shardwright.compat.symbols import has_symbols
from shardwright.index.overlap import Strided
from shardwright.plan.work import Memory

MANY = 3  # views: from here on a choice of rows is less work in a graph than a write for each
_MOST_ROWS = 1 << 16  # the numbers of rows are a constant of the graph


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
    if type(x) is not Tensor:  # as in graphs
        return part_of(x, Strided((memory.numel,), (1,), 0))
    return x.as_strided((memory.numel,), (1,), x.storage_offset())


def shaped(flat: Tensor, memory: Memory) -> Tensor:
    """The reverse of `flat_memory`."""
    return flat.as_strided(memory.shape, memory.stride, flat.storage_offset())


def view_of(x: Tensor, view: Strided) -> Tensor:
    """A strided view of the memory of `x`; `start` counts from its first element."""
    return x.as_strided(view.size, view.stride, x.storage_offset() + view.start)


def part_of(x: Tensor, view: Strided) -> Tensor:
    """As `view_of`, to read, of a tensor that `in_memory` gave.

    In a graph by steps that count from where `x` begins: what the graph is given (a slice of a buffer, the
    gradient of a view) may begin elsewhere in its storage each time it runs.
    """
    if type(x) is Tensor or not x.is_contiguous():  # what `in_memory` made lies at the start of its own
        return x.as_strided(view.size, view.stride, x.storage_offset() + view.start)
    flat = x.view(-1)
    if view.is_run and view.start == 0 and view.numel == flat.numel():
        return flat.view(view.size)
    of_symbols = has_symbols((*view.size, *view.stride, view.start))
    return (_in_rows if of_symbols else _in_windows)(flat, view)


def _in_rows(flat: Tensor, view: Strided) -> Tensor:
    """A box of flat memory, dim by dim: `unfold` knows no symbols."""
    start = view.start
    for size, step in zip(view.size, view.stride, strict=True):
        first = 0 if start < step else start // step
        start -= first * step
        flat = flat.unflatten(-1, (-1, step)).narrow(-2, first, size)
    return flat.narrow(-1, start, 1).squeeze(-1)


def _in_windows(flat: Tensor, view: Strided) -> Tensor:
    """A strided view of flat memory, dim by dim, the longest steps first.

    A run is one slice: inductor loses writes that read complex numbers by windows of one (torch 2.13).
    """
    if not view.numel:
        return flat.narrow(0, 0, 0).view(view.size)
    if view.is_run:
        return flat.narrow(0, view.start, view.numel).view(view.size)
    order = sorted(range(len(view.size)), key=lambda dim: -view.stride[dim])
    span = 1 + sum((size - 1) * step for size, step in zip(view.size, view.stride, strict=True))
    found = flat.narrow(0, view.start, span)
    for dim in order:
        size, step = view.size[dim], view.stride[dim]
        span -= (size - 1) * step
        found = found.unfold(-1, span, max(step, 1))
    return found.squeeze(-1).permute(sorted(range(len(order)), key=order.__getitem__))


def joined(x: Tensor, views: Sequence[Strided]) -> Tensor:
    """The elements of some views, one after the other, flat; each is copied once."""
    if len(views) == 1:
        return part_of(x, views[0]).reshape(-1).contiguous()
    if views and torch.compiler.is_compiling():
        rows = _rows(views, x.numel())
        if rows is not None:
            return _chosen(part_of(x, Strided((x.numel(),), (1,), 0)), *rows)
        return torch.cat([part_of(x, view).reshape(-1) for view in views])
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


def arranged(
    x: Tensor,
    pairs: Sequence[tuple[Strided, Strided]],
    memory: Memory,
    received: Sequence[Tensor] = (),
    fills: Sequence[Strided] = (),
) -> Tensor | None:
    """New memory that copies of views of `x`, then what was received fill, as one choice of rows; or None."""
    rows = _rows([*(place for _, place in pairs), *fills], memory.numel)
    if rows is None or rows[0] * len(rows[1]) != memory.numel:
        return None
    width, at = rows
    parts = [*([joined(x, [taken for taken, _ in pairs])] if pairs else ()), *received]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return shaped(_chosen(flat, width, sorted(range(len(at)), key=at.__getitem__)), memory)


def _chosen(flat: Tensor, width: int, at: Sequence[int]) -> Tensor:
    rows = torch.tensor(at, dtype=torch.int64, device=flat.device)
    return flat.view(-1, width).index_select(0, rows).view(-1)


def _rows(views: Sequence[Strided], numel: int) -> tuple[int, list[int]] | None:
    """In a graph: the views of `numel` elements of memory as numbers of rows, after how wide a row is.

    There a write into a view makes the whole tensor anew, with a node for each view on the way. None where
    views are few, or rows are many.
    """
    if len(views) < MANY or not torch.compiler.is_compiling() or has_symbols((numel,)) or not numel:
        return None
    split = [_split(view) for view in views]
    width = gcd(numel, *[n for start, dims, run in split for n in (start, run, *[step for _, step in dims])])
    if sum(view.numel for view in views) > width * _MOST_ROWS:
        return None
    at = []
    for start, dims, run in split:
        steps = [[i * step for i in range(size)] for size, step in dims]
        at += [(start + sum(offsets)) // width for offsets in product(*steps, range(0, run, width))]
    return (width, at) if max(at) * width < numel else None


def _split(view: Strided) -> tuple[int, list[tuple[int, int]], int]:
    """Where a view starts, its dims as sizes and steps, and how long the memory at each place is one run."""
    dims = list(zip(view.size, view.stride, strict=True))
    run = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    return view.start, dims, run


def move(x: Tensor, out: Tensor, pairs: Sequence[tuple[Strided, Strided]]) -> None:
    """Copy views of `x` to views of `out`."""
    for source, target in pairs:
        view_of(out, target).copy_(part_of(x, source))
