"""Collectives on plain tensors: new tensor out, finished on return, no autograd.

They call torch's functional ops by name, which costs the same as `torch.distributed`'s own calls and can be
traced by `torch.compile` (the wrappers of `_functional_collectives` cost twice that in eager mode). A group
is passed by its name because a name is a constant in a traced graph. A group of one never communicates.

Eagerly they are called below autograd: torch's formulas for their gradients are Python, and asking them
whether anything wants one took longer than the call (8 of 14 us of an exchange).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwright.comm import record
from shardwright.comm.dtype import NATIVE, as_bytes, carrier
from shardwright.comm.record import Sending, recording
from shardwright.comm.uncounted import is_counted
from shardwright.compat import below_autograd
from shardwright.compat.graph_order import kept
from shardwright.compat.symbols import hint, hints

_ops = torch.ops._c10d_functional


# The group of a collective, and what the record says of it: axis and reason. No class: a call less each time.
Told = tuple[ProcessGroup, str, str]


def _sending(told: Told, op: str, x: Tensor, sent: int) -> Sending:
    """The block that makes one call of the process group, for the record."""
    _, axis, reason = told
    return Sending(op, axis=axis, bytes_sent=hint(sent), reason=reason, shape=hints(x.shape), dtype=x.dtype)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()  # torch's `nbytes` knows no symbols


def exchange_rows(
    x: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    group: ProcessGroup,
    *,
    axis: str = "",
    reason: str = "",
) -> Tensor:
    """Send `in_splits[i]` rows to member i, receive `out_splits[i]`:  [sum(in), ...] -> [sum(out), ...].

    Cost: each rank sends all its rows but those for itself. Any dtype; zeros allowed.
    """
    if group.size() == 1:
        return x.clone()
    told = (group, axis, reason)
    if x.dtype in NATIVE:
        return _all_to_all(x.contiguous(), list(out_splits), list(in_splits), told)
    return _exchange_as_bytes(x, out_splits, in_splits, told)


def _exchange_as_bytes(x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], told: Told) -> Tensor:
    row = _row_bytes(x)
    received = _all_to_all(as_bytes(x), [row * s for s in out_splits], [row * s for s in in_splits], told)
    return received.view(x.dtype).view(sum(out_splits), *x.shape[1:])


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * prod(x.shape[1:])


def _all_to_all(x: Tensor, out_splits: list[int], in_splits: list[int], told: Told) -> Tensor:
    if record.on and recording():
        sent = (x.shape[0] - in_splits[told[0].rank()]) * _row_bytes(x)
        with _sending(told, "all_to_all", x, sent):
            return _exchanged(x, out_splits, in_splits, told[0])
    return _exchanged(x, out_splits, in_splits, told[0])


def _exchanged(x: Tensor, out_splits: list[int], in_splits: list[int], group: ProcessGroup) -> Tensor:
    name = group.group_name
    if torch.compiler.is_compiling():
        return kept(lambda given: _ops.all_to_all_single(given, out_splits, in_splits, name), x)
    with below_autograd():
        return cast("Tensor", _ops.wait_tensor(_ops.all_to_all_single(x, out_splits, in_splits, name)))


def reduce_over(x: Tensor, op: str, group: ProcessGroup, *, axis: str = "", reason: str = "") -> Tensor:
    """Reduce x over the group, the result on every member:  [...] -> [...].

    Args: op: "sum", "avg", "max", "min" or "product".
    Raises: PlanError: the reduction has no meaning for this dtype (avg of integers).
    Cost: each rank sends 2(n-1)/n of x.
    """
    return start_reduction(x, op, group, axis=axis, reason=reason)()


def start_reduction(
    x: Tensor, op: str, group: ProcessGroup, *, axis: str = "", reason: str = ""
) -> Callable[[], Tensor]:
    """As `reduce_over`, only posted: the function that it returns waits. x is read no more."""
    carried = carrier(x.dtype, op)
    if group.size() == 1:
        return x.clone
    told = (group, axis, reason)
    if x.is_complex():
        pairs = _start_reduction(torch.view_as_real(x.resolve_conj()), op, told)
        return lambda: torch.view_as_complex(pairs())
    if carried == x.dtype:  # compiled by torch 2.11, what ends in a cast to its own dtype has no gradient
        return _start_reduction(x, op, told)
    reduced, dtype = _start_reduction(x.to(carried), op, told), x.dtype
    return lambda: reduced().to(dtype)


def start_sum(x: Tensor, group: ProcessGroup, *, axis: str = "", reason: str = "") -> Callable[[], Tensor]:
    """As `start_reduction` of a sum, into the memory of `x` where the backends add its dtype.

    Where a mode of torch counts what is sent, it is a sum that the mode knows, in memory of its own.
    """
    if group.size() == 1:
        return lambda: x
    if x.is_complex() or carrier(x.dtype, "sum") != x.dtype or not x.is_contiguous():
        return start_reduction(x, "sum", group, axis=axis, reason=reason)
    told = (group, axis, reason)
    sent = 2 * (group.size() - 1) * x.nbytes // group.size()
    if torch.compiler.is_compiling() or is_counted():
        return start_reduction(x, "sum", group, axis=axis, reason=reason)
    with (
        _sending(told, "all_reduce", x, sent) if record.on and recording() else nullcontext(),
        below_autograd(),
    ):
        summed = _ops.all_reduce_(x, "sum", group.group_name)
    return lambda: _reduced(summed, "sum", group.size())


def _start_reduction(x: Tensor, op: str, told: Told) -> Callable[[], Tensor]:
    if op in ("max", "min") and x.is_floating_point():
        finished = _extreme(x, op, told)
        return lambda: finished
    n = told[0].size()
    native = "sum" if op == "avg" else op
    name = told[0].group_name
    with (
        _sending(told, "all_reduce", x, 2 * (n - 1) * _bytes(x) // n)
        if record.on and recording()
        else nullcontext()
    ):
        if torch.compiler.is_compiling():
            whole = kept(lambda given: _ops.all_reduce(given, native, name), x.contiguous())
            return lambda: whole.div(n) if op == "avg" else whole
        with below_autograd():
            reduced = _ops.all_reduce(x.contiguous(), native, name)
    return lambda: _reduced(reduced, op, n)


def _reduced(pending: Tensor, op: str, n: int) -> Tensor:
    with below_autograd():
        reduced: Tensor = _ops.wait_tensor(pending)
    return reduced.div_(n) if op == "avg" else reduced


def _extreme(x: Tensor, op: str, told: Told) -> Tensor:
    """Max or min in which NaN wins, as in `torch.maximum`; the backends' own drops it. Sends what they do."""
    n = told[0].size()
    part = -(-x.numel() // n)
    padded = torch.nn.functional.pad(x.reshape(-1), (0, n * part - x.numel()))
    terms = _all_to_all(padded, [part] * n, [part] * n, told).view(n, part)
    finished = terms.amax(0) if op == "max" else terms.amin(0)
    return _all_gather(finished, [part] * n, told)[: x.numel()].view(x.shape)


def gather_rows(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup, *, axis: str = "", reason: str = ""
) -> Tensor:
    """Concatenate the rows of all members in group order:  [sizes[rank], ...] -> [sum(sizes), ...].

    Cost: each rank sends n-1 times its rows; equal sizes use the native all-gather.
    """
    if group.size() == 1:
        return x.clone()
    told = (group, axis, reason)
    if x.dtype not in NATIVE:
        return _gather_as_bytes(x, sizes, told)
    return _all_gather(x.contiguous(), sizes, told)


def _gather_as_bytes(x: Tensor, sizes: Sequence[int], told: Told) -> Tensor:
    row = _row_bytes(x)
    received = _all_gather(as_bytes(x), [row * s for s in sizes], told)
    return received.view(x.dtype).view(sum(sizes), *x.shape[1:])


def _all_gather(x: Tensor, sizes: Sequence[int], told: Told) -> Tensor:
    n = told[0].size()
    if any(size != sizes[0] for size in sizes):
        # Uneven: an all-to-all that repeats the rows moves exactly the missing ones; padding would move more.
        repeated = x.repeat(n, *([1] * (x.dim() - 1)))
        return _all_to_all(repeated, list(sizes), [x.shape[0]] * n, told)
    return gather_equal(x, told)


def gather_equal(x: Tensor, told: Told) -> Tensor:
    """`gather_rows` of contiguous rows, as many on each of several members, whose dtype moves natively."""
    group = told[0]
    n = group.size()
    name = group.group_name
    with _sending(told, "all_gather", x, (n - 1) * _bytes(x)) if record.on and recording() else nullcontext():
        if torch.compiler.is_compiling():
            return kept(lambda given: _ops.all_gather_into_tensor(given, n, name), x)
        with below_autograd():
            return cast("Tensor", _ops.wait_tensor(_ops.all_gather_into_tensor(x, n, name)))


def reduce_scatter_rows(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup, *, axis: str = "", reason: str = ""
) -> Tensor:
    """Sum the terms of all members, each keeps its own rows:  [sum(sizes), ...] -> [sizes[rank], ...].

    The terms are added in rank order, in float32 for half types: deterministic, and on gloo half the bytes
    of its reduce-scatter. Cost: each rank sends all rows but its own.
    """
    mine = sizes[group.rank()]
    n = group.size()
    received = exchange_rows(x, [mine] * n, sizes, group, axis=axis, reason=reason)
    return sum_in_order(received.view(n, mine, *x.shape[1:]))


def sum_in_order(terms: Tensor) -> Tensor:
    """Sum over dim 0, first to last, half types in a float32 accumulator:  [n, ...] -> [...]."""
    wide = torch.float32 if terms.dtype in (torch.float16, torch.bfloat16) else terms.dtype
    total = terms[0].to(wide, copy=True)
    for term in terms[1:]:
        total = total.add(term) if torch.compiler.is_compiling() else total.add_(term)
    return total if total.dtype == terms.dtype else total.to(terms.dtype)
