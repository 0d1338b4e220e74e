"""Bringing gradients to the layouts of their parameters, with all ranks agreed on what is done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.bucket import all_reduce_bucketed
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.grads.entry import Entry
from shardwright.grads.parameters import name_list
from shardwright.grads.state import GradientState, agree, told_by_any
from shardwright.layout.layout import Layout
from shardwright.tensor.dtensor import DTensor
from shardwright.tensor.spec import spec_of
from shardwright.tensor.wrap import as_ours, wrap


@dataclass(frozen=True)
class _Entry(Entry):
    """own: the state of its gradient on this rank.   held: the gradient, for reading `.grad` is a call."""

    own: GradientState
    held: DTensor | None

    @property
    def gradient(self) -> DTensor:
        """Its gradient, as it was when this entry was made."""
        return super().gradient if self.held is None else self.held


def finish_gradients(parameters: Mapping[str, TorchDTensor], bucket_bytes: int, *, agreed: bool) -> None:
    """Give every gradient the layout of its parameter, adding up what is pending.

    A gradient that only some ranks have is zeros on the others; one that only some ranks have a new term of
    (a second backward after a sum) becomes a term on all.

    Args:
        parameters: {name: distributed parameter}, the same on every rank of their meshes.
        bucket_bytes: the size of one flat all-reduce.
        agreed: every rank is known to have the same gradients in the same states, so nobody asks.

    Raises:
        ParallelError: the layouts of one gradient on two ranks contradict each other; raised on every rank.
    """
    by_mesh: defaultdict[DeviceMesh, list[_Entry]] = defaultdict(list)
    for name, parameter in parameters.items():
        placed = as_ours(parameter)
        gradient = parameter.grad
        state = GradientState.of(name, gradient, placed)
        held = as_ours(gradient) if isinstance(gradient, TorchDTensor) else None
        by_mesh[placed.device_mesh].append(_Entry(name, parameter, placed, state, held))
    for mesh, entries in by_mesh.items():
        states = [entry.own for entry in entries]
        if not agreed:
            states = agree(mesh, states, entries[0].parameter.device)
            _check(entries, states)
            _join(mesh, entries, states)
        _finish(mesh, list(zip(entries, states, strict=True)), bucket_bytes)


def _join(mesh: DeviceMesh, entries: list[_Entry], states: Sequence[GradientState]) -> None:
    """Where only some ranks have a gradient that lies otherwise than its parameter, the others get zeros.

    Cost: none where there is no such gradient; else the layouts of all of them, over each axis.
    """
    asked = [i for i, state in enumerate(states) if state.other and state.missing]
    if not asked:
        return
    own = {i: None if entries[i].own.missing else entries[i].gradient._spec.layout for i in asked}
    told = told_by_any(mesh, own)
    for i in asked:
        if entries[i].own.missing:
            entries[i] = _with_zeros(entries[i], told[i])


def _with_zeros(entry: _Entry, layout: Layout) -> _Entry:
    """A gradient of zeros in this layout, in place of none."""
    spec = spec_of(layout, entry.placed.device_mesh)
    shape = layout.local_shape(spec.coords or (0,) * len(layout.sizes))
    zeros = wrap(entry.placed._local_tensor.new_zeros(shape, dtype=layout.dtype), spec)
    entry.parameter.grad = zeros
    return replace(entry, own=entry.state(), held=zeros)


def _check(entries: Sequence[_Entry], states: Sequence[GradientState]) -> None:
    """Raise ParallelError for states that have no common way on."""
    names = [entry.name for entry, state in zip(entries, states, strict=True) if state.is_contradictory]
    if names:
        raise ParallelError(
            f"gradients of {name_list(names)} have other layouts on some ranks than on their peers; run the "
            "same backward passes on all ranks"
        )


def _finish(mesh: DeviceMesh, work: Sequence[tuple[_Entry, GradientState]], bucket_bytes: int) -> None:
    """Bring gradients to their parameters' layouts: sums in buckets, whatever else one by one."""
    buckets: defaultdict[tuple[bool, ...], list[_Entry]] = defaultdict(list)
    for entry, state in work:
        if state.other:
            target = entry.placed._spec.layout
            moved = entry.gradient.redistribute(mesh, list(target.placements), order=target.order_names)
            entry.parameter.grad = moved.detach()
        elif any(state.pending):
            buckets[state.pending].append(entry)
        elif state.exists and entry.own.missing:
            entry.put(torch.zeros_like(entry.placed._local_tensor))
    for pending, entries in buckets.items():
        _sum_in_buckets(mesh, pending, entries, bucket_bytes)


def _sum_in_buckets(
    mesh: DeviceMesh, pending: tuple[bool, ...], entries: Sequence[_Entry], bucket_bytes: int
) -> None:
    """All-reduce the local terms over the pending axes in flat buckets, one per dtype and `bucket_bytes`."""
    terms = [entry.term(entry.own, pending) for entry in entries]
    sums: list[Tensor] = list(terms)
    summed = {
        axis
        for axis, is_summed in zip(entries[0].placed._spec.layout.axes, pending, strict=True)
        if is_summed
    }
    for axis, group in groups_above_one(mesh):
        if axis in summed:
            sums = all_reduce_bucketed(sums, "sum", group, bucket_bytes, axis=axis, reason="sum gradients")
    for entry, term, total in zip(entries, terms, sums, strict=True):
        like = None if entry.own.missing else entry.gradient._spec.layout
        entry.put(total if term.is_contiguous() else torch.empty_like(term).copy_(total), like)
