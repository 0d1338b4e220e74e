"""Bringing gradients to the layouts of their parameters, with all ranks agreed on what is done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.bucket import all_reduce_bucketed
from shardwright.comm.functional import reduce_over
from shardwright.compat import axis_names
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.grads.parameters import name_list
from shardwright.layout.layout import Layout
from shardwright.placement.partial import Partial
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_ours, wrap

REASON = "sum gradients"
_NO_GRADIENT = -1
_BIG = 2**62


@dataclass(frozen=True)
class _Entry:
    """One parameter, what it is called, and what state its gradient is in on this rank (see `_state_of`)."""

    name: str
    parameter: TorchDTensor
    placed: DTensor
    state: int

    @property
    def mesh(self) -> DeviceMesh:
        return self.placed.device_mesh


def finish_gradients(parameters: Mapping[str, TorchDTensor], bucket_bytes: int, *, agreed: bool) -> None:
    """Give every gradient the layout of its parameter, adding up what is pending.

    Args:
        parameters: {name: distributed parameter}, the same on every rank of their meshes.
        bucket_bytes: the size of one flat all-reduce.
        agreed: every rank is known to have the same gradients in the same states, so nobody asks.

    Raises:
        ParallelError: ranks have one gradient in different states.
    """
    by_mesh: defaultdict[DeviceMesh, list[_Entry]] = defaultdict(list)
    for name, parameter in parameters.items():
        entry = _entry(name, parameter)
        by_mesh[entry.mesh].append(entry)
    for mesh, entries in by_mesh.items():
        states = [entry.state for entry in entries] if agreed else _agree(mesh, entries)
        wanted = [(e, state) for e, state in zip(entries, states, strict=True) if state != _NO_GRADIENT]
        for entry, state in wanted:
            if entry.state == _NO_GRADIENT:
                entry.parameter.grad = _zeros(entry, state)
        _finish(mesh, [entry for entry, state in wanted if state > 0], bucket_bytes)


def _entry(name: str, parameter: TorchDTensor) -> _Entry:
    """Return what is known of one parameter on this rank."""
    placed = as_ours(parameter)
    return _Entry(name, parameter, placed, _state_of(name, parameter.grad, placed))


def _state_of(name: str, gradient: Tensor | None, placed: DTensor) -> int:
    """Return -1 without gradient, 0 if its layout is the parameter's, else a set of pending axes as bits.

    The bit after the last axis: a finished axis differs from the parameter's.
    """
    if gradient is None:
        return _NO_GRADIENT
    layout = _gradient_layout(name, gradient, placed)
    pairs = list(zip(layout.placements, placed.layout.placements, strict=True))
    pending = sum(1 << axis for axis, (have, want) in enumerate(pairs) if have.is_pending and have != want)
    differs = any(have != want and not have.is_pending for have, want in pairs)
    return pending | (differs << len(pairs))


def _gradient_layout(name: str, gradient: Tensor, placed: DTensor) -> Layout:
    """Return the layout of a gradient, which must live where its parameter does."""
    if not isinstance(gradient, TorchDTensor):
        raise ParallelError(
            f"the gradient of {name} is a plain tensor although the parameter is distributed "
            f"({placed.layout}); assign a DTensor on the parameter's mesh"
        )
    if gradient.device_mesh != placed.device_mesh:
        raise ParallelError(
            f"the gradient of {name} is on {gradient.device_mesh}, its parameter on {placed.device_mesh}; "
            "redistribute it to the parameter's mesh"
        )
    return as_ours(gradient).layout


def _agree(mesh: DeviceMesh, entries: Sequence[_Entry]) -> list[int]:
    """Return the state that each gradient has on the ranks that have it; -1 where none has.

    Cost: one all-reduce of 16 bytes per parameter and axis.
    """
    states = torch.tensor([entry.state for entry in entries], dtype=torch.int64)
    lowest = torch.where(states == _NO_GRADIENT, -_BIG, -states)
    both = torch.cat([states, lowest]).to(entries[0].parameter.device)
    for axis, group in groups_above_one(mesh):
        both = reduce_over(both, "max", group, axis=axis, reason="which ranks have which gradients")
    highest, negated_lowest = both.tolist()[: len(entries)], both.tolist()[len(entries) :]
    _check_same(entries, highest, negated_lowest)
    return list(highest)


def _check_same(entries: Sequence[_Entry], highest: Sequence[int], negated_lowest: Sequence[int]) -> None:
    """Raise ParallelError, on every rank, if two ranks hold one gradient in different states."""
    differing = [
        entry.name
        for entry, high, low in zip(entries, highest, negated_lowest, strict=True)
        if high not in (_NO_GRADIENT, -low)
    ]
    if differing:
        raise ParallelError(
            f"gradients of {name_list(differing)} are still to be summed on some ranks, finished on others; "
            "run the same backward passes and synchronise on all ranks"
        )


def _zeros(entry: _Entry, state: int) -> DTensor:
    """Return this rank's part of a gradient that only its peers have: zeros, in the state of theirs."""
    layout = entry.placed.layout
    placements = [
        Partial("sum") if state >> axis & 1 else placement for axis, placement in enumerate(layout.placements)
    ]
    label = layout.with_placements(tuple(placements), order=layout.order_names)
    return wrap(torch.zeros_like(entry.placed._local_tensor), spec_of(label, entry.mesh))


def _finish(mesh: DeviceMesh, entries: Sequence[_Entry], bucket_bytes: int) -> None:
    """Bring gradients to their parameters' layouts: sums in buckets, whatever else one by one."""
    buckets: defaultdict[tuple[str, ...], list[_Entry]] = defaultdict(list)
    for entry in entries:
        axes = _summed_axes(entry)
        if axes is None:
            target = entry.placed.layout
            gradient = as_ours(_gradient(entry))
            entry.parameter.grad = gradient.redistribute(
                mesh, list(target.placements), order=target.order_names
            ).detach()
        else:
            buckets[axes].append(entry)
    for axes, members in buckets.items():
        _sum_in_buckets(mesh, axes, members, bucket_bytes)


def _summed_axes(entry: _Entry) -> tuple[str, ...] | None:
    """Return the axes on which a plain sum over the ranks is all that is missing; None if it is not all."""
    have = as_ours(_gradient(entry)).layout
    axes = []
    pairs = zip(axis_names(entry.mesh), have.placements, entry.placed.layout.placements, strict=True)
    for axis, placement, wanted in pairs:
        if placement == wanted:
            continue
        if placement != Partial("sum") or not wanted.is_replicated:
            return None
        axes.append(axis)
    return tuple(axes)


def _sum_in_buckets(
    mesh: DeviceMesh, axes: tuple[str, ...], entries: Sequence[_Entry], bucket_bytes: int
) -> None:
    """All-reduce the local gradients over `axes` in flat buckets, one per dtype and `bucket_bytes`."""
    gradients = [as_ours(_gradient(entry)) for entry in entries]
    locals_ = [gradient._local_tensor for gradient in gradients]
    reduced: list[Tensor] = list(locals_)
    for axis, group in groups_above_one(mesh):
        if axis in axes:
            reduced = all_reduce_bucketed(reduced, "sum", group, bucket_bytes, axis=axis, reason=REASON)
    for entry, gradient, old, new in zip(entries, gradients, locals_, reduced, strict=True):
        target = entry.placed.layout
        label = gradient.layout.with_placements(target.placements, order=target.order_names)
        entry.parameter.grad = wrap(_with_strides_of(old, new), spec_of(label, mesh))


def _with_strides_of(old: Tensor, new: Tensor) -> Tensor:
    """Return `new` laid out in memory as `old`, as the layout of the gradient says."""
    return new if old.is_contiguous() else torch.empty_like(old).copy_(new)


def _gradient(entry: _Entry) -> DTensor:
    """Return the gradient of an entry that has one."""
    gradient = entry.parameter.grad
    if not isinstance(
        gradient, torch.distributed.tensor.DTensor
    ):  # pragma: no cover - `_state_of` refused it
        raise ParallelError(f"the gradient of {entry.name} is missing")
    return as_ours(gradient)
