"""Summing gradients while the backward goes on: a bucket is sent as soon as its last gradient is complete.

Every rank sends the same buckets in the same order, whatever gradients it has: one that it lacks counts as
zeros, and what each rank had is told in the tail of the last bucket. So nobody agrees on anything first, no
rank waits for a peer whose graph is another one, and a rank without rows may leave out its backward.

Gradients that are no terms of a sum (those of a sharded unit, of experts that are spread) are left as they
are; whether all ranks have them alike is told in the tail of a last bucket of the same ranks, which is then
sent at the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.comm.functional import reduce_over, start_sum
from shardwright.compat import axis_names
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.grads.alike import NUMBERS, Crowd, are_alike, crowds_of, in_numbers
from shardwright.grads.entry import Entry
from shardwright.grads.grid import GridOfRanks, grid_of
from shardwright.grads.other_layouts import home_on_shared_axes
from shardwright.grads.parameters import name_list
from shardwright.grads.state import GradientState
from shardwright.tensor.autograd import GradientIsTaken
from shardwright.tensor.wrap import as_ours

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

_REASON = "sum gradients"


@dataclass(frozen=True)
class _Kind:
    """What the parameters of a bucket have in common: the ranks whose terms are summed, and as what."""

    ranks: GridOfRanks
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class _Summed(Entry):
    """pending: per axis of its mesh, whether its gradient is summed over it."""

    pending: tuple[bool, ...]


@dataclass
class _Bucket:
    """Parameters whose terms travel together, in this order.

    tells: it is the last of its kind: its tail says of each parameter of the kind whether this rank has a
    term, and whether it has a gradient that is none.
    asks: it is the last of its ranks: the end of its tail says what this rank has of these, which nobody
    sums; so it waits for the end of the backward.
    """

    kind: _Kind
    members: list[_Summed] = field(default_factory=list)
    terms: dict[int, Tensor] = field(default_factory=dict)
    tells: list[_Summed] | None = None
    asks: Crowd | None = None
    wait: Callable[[], Tensor] | None = None

    @property
    def complete(self) -> bool:
        return len(self.terms) == len(self.members)


class OverlappedSum:
    """One backward whose gradients are summed while it goes on.

    Args:
        parameters: {name: parameter}, the same on every rank.
        bucket_bytes: of the gradients that are sent together.
    """

    def __init__(self, parameters: Mapping[str, TorchDTensor], bucket_bytes: int) -> None:
        self._buckets: list[_Bucket] = []
        self._place: dict[int, tuple[_Bucket, int]] = {}
        self._had: dict[int, tuple[bool, bool]] = {}  # by parameter: a term, and what is no term
        self._next = 0
        self._ends = False
        last: dict[_Kind, _Bucket] = {}
        told: dict[_Kind, list[_Summed]] = {}
        left = dict(parameters)
        backwards = list(parameters.items())[::-1]  # the backward goes from the last to the first
        for name, parameter in backwards:
            entry = _summed(name, parameter)
            if entry is None:
                continue
            del left[name]
            kind = _kind_of(entry)
            told.setdefault(kind, []).append(entry)
            bucket = last.get(kind)
            if bucket is None or _bytes(bucket) + _size(entry) > bucket_bytes:
                bucket = last[kind] = _Bucket(kind)
                self._buckets.append(bucket)
            self._place[id(parameter)] = bucket, len(bucket.members)
            bucket.members.append(entry)
        for kind, bucket in last.items():
            bucket.tells = told[kind]
        self._left = self._asking(crowds_of(left))

    def _asking(self, left: Mapping[frozenset[int], Crowd]) -> list[Crowd]:
        """Let the last bucket of some ranks ask about what else they have; these buckets come last."""
        last = {bucket.kind.ranks.members: bucket for bucket in self._buckets if bucket.tells is not None}
        for ranks in last.keys() & left.keys():
            last[ranks].asks = left[ranks]
        self._buckets.sort(key=lambda bucket: bucket.asks is not None)
        return list(left.values())

    def listen(self) -> Callable[[], None]:
        """Take each gradient as it becomes complete. Returns: what ends that."""
        handles = []
        for bucket in self._buckets:
            for entry in bucket.members:
                hook = entry.parameter.register_post_accumulate_grad_hook(self._completed)
                handles += [hook, GradientIsTaken(entry.parameter)]

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop

    def _completed(self, parameter: Tensor) -> None:
        bucket, at = self._place[id(parameter)]
        if id(parameter) in self._had:  # also where its bucket is gone
            raise ParallelError(
                f"{bucket.members[at].name} got a second gradient after its first was sent: run one backward "
                "in a block of `overlapped()`, and those before it outside"
            )
        self._take(bucket, at)
        self._send()

    def _take(self, bucket: _Bucket, at: int) -> None:
        """This rank's term of a sum: from now on it is in the bucket alone."""
        entry = bucket.members[at]
        state = entry.state()
        if state.other:
            entry.parameter.grad = home_on_shared_axes(entry.gradient, entry.placed)
            state = entry.state()
        fits = _fits(bucket.kind, entry, state)
        self._had[id(entry.parameter)] = state.exists and fits, not fits
        bucket.terms[at] = entry.term(state if fits else GradientState(missing=True), entry.pending)
        if fits:
            entry.parameter.grad = None

    def _send(self) -> None:
        """Post every bucket that is complete and whose turn it is."""
        while self._next < len(self._buckets) and self._buckets[self._next].complete:
            bucket = self._buckets[self._next]
            if bucket.asks is not None and not self._ends:
                return
            pieces = [bucket.terms[at].reshape(-1) for at in range(len(bucket.members))]
            if bucket.tells is not None:
                flags = [float(flag) for entry in bucket.tells for flag in self._had[id(entry.parameter)]]
                pieces.append(torch.tensor(flags, dtype=bucket.kind.dtype, device=bucket.kind.device))
            if bucket.asks is not None:
                digest, _ = bucket.asks.states()
                pieces.append(in_numbers(digest, bucket.kind.dtype, bucket.kind.device))
            bucket.terms.clear()
            bucket.wait = _started(torch.cat(pieces), bucket.members[0])
            self._next += 1

    def finish(self) -> list[tuple[dict[str, TorchDTensor], bool]]:
        """Send what is left, wait for all of it, and give every sum the layout of its parameter.

        Returns: parameters that are still to be looked at, and whether all ranks have their gradients alike.
        Raises: ParallelError: some ranks have terms of a gradient where others have a layout of their own.
        """
        self._ends = True
        for bucket in self._buckets[self._next :]:
            for at in range(len(bucket.members)):
                if at not in bucket.terms:
                    self._take(bucket, at)
            self._send()
        sums = [bucket.wait() for bucket in self._buckets if bucket.wait is not None]
        had = self._told(sums)
        wrong = [entry.name for entry, (a_term, other) in had if a_term and other]
        if wrong:
            raise ParallelError(
                f"gradients of {name_list(wrong)} have other layouts on some ranks than on their peers; run "
                "the same backward passes on all ranks"
            )
        exists = {id(entry.parameter) for entry, (a_term, _) in had if a_term}
        found = [({entry.name: entry.parameter for entry, (_, other) in had if other}, False)]
        for bucket, flat in zip(self._buckets, sums, strict=True):
            if bucket.asks is not None:
                found.append((bucket.asks.parameters, are_alike(flat)))
            for entry, total in zip(bucket.members, _pieces(bucket, flat), strict=True):
                if id(entry.parameter) in exists:
                    own = entry.placed._local_tensor
                    entry.put(total if own.is_contiguous() else torch.empty_like(own).copy_(total))
        asked = {id(bucket.asks) for bucket in self._buckets}
        found += [(crowd.parameters, False) for crowd in self._left if id(crowd) not in asked]
        return [each for each in found if each[0]]

    def _told(self, sums: Sequence[Tensor]) -> list[tuple[_Summed, tuple[bool, bool]]]:
        """Of each parameter: whether any rank had a term of its gradient, whether any had something else."""
        found: list[tuple[_Summed, tuple[bool, bool]]] = []
        for bucket, flat in zip(self._buckets, sums, strict=True):
            if bucket.tells is not None:
                tail = flat if bucket.asks is None else flat[:-NUMBERS]
                flags = [bool(flag) for flag in tail[-2 * len(bucket.tells) :].tolist()]
                found += zip(bucket.tells, zip(flags[::2], flags[1::2], strict=True), strict=True)
        return found


def _fits(kind: _Kind, entry: _Summed, state: GradientState) -> bool:
    """Whether this rank's gradient is a term of the bucket's sum, or none."""
    if state.missing:
        return True
    terms_elsewhere = any(have and not want for have, want in zip(state.pending, entry.pending, strict=True))
    return not (state.other or terms_elsewhere) and entry.gradient.dtype == kind.dtype


def _started(flat: Tensor, member: _Summed) -> Callable[[], Tensor]:
    """Post the sum over the first axis; the function that it returns waits, and sums over the others."""
    mesh = member.placed._spec.mesh
    summed = {axis for axis, each in zip(axis_names(mesh), member.pending, strict=True) if each}
    groups = [(axis, group) for axis, group in groups_above_one(mesh) if axis in summed]
    if not groups:
        return lambda: flat
    (axis, group), *others = groups
    first = start_sum(flat, group, axis=axis, reason=_REASON)

    def wait() -> Tensor:
        total = first()
        for name, each in others:
            total = reduce_over(total, "sum", each, axis=name, reason=_REASON)
        return total

    return wait


def _summed(name: str, parameter: TorchDTensor) -> _Summed | None:
    """None: its gradient is complete on each rank, or nobody knows before the backward what it will be."""
    placed = as_ours(parameter)
    spec = placed._spec
    if spec.use is None or getattr(parameter, "_spec", None) is not spec:
        return None
    layout = spec.layout
    pending = tuple(
        axis in spec.use.summed and placement.is_replicated
        for axis, placement in zip(layout.axes, layout.placements, strict=True)
    )
    return _Summed(name, parameter, placed, pending) if any(pending) else None


def _kind_of(entry: _Summed) -> _Kind:
    spec = entry.placed._spec
    return _Kind(grid_of(spec.mesh, entry.pending), spec.layout.dtype, entry.placed.device)


def _size(entry: _Summed) -> int:
    return entry.placed._local_tensor.nbytes


def _bytes(bucket: _Bucket) -> int:
    return sum(map(_size, bucket.members))


def _pieces(bucket: _Bucket, flat: Tensor) -> list[Tensor]:
    """The sums of a bucket's members, views of it."""
    shapes = [entry.placed._local_tensor.shape for entry in bucket.members]
    sizes = [shape.numel() for shape in shapes]
    return [x.view(shape) for x, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]
