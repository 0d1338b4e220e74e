"""Summing gradients while the backward goes on: a bucket is sent as soon as its last gradient is complete.

Every rank sends the same buckets in the same order, whatever gradients it has: one that it lacks counts as
zeros, and what each rank had is told in the tail of the last bucket, at the end. So nobody agrees on anything
first, no rank waits for a peer whose graph is another one, and a rank without rows may skip its backward.

A parameter may get a gradient again after its first was sent: a checkpoint that is reentrant runs a backward
of its own for each call of a layer. Such terms stay here until the end, where all ranks know of them, and are
summed once more.

Gradients that are no terms of a sum (those of a sharded unit, of experts that are spread) are left as they
are; whether all ranks have them alike is told in the tail of a last bucket of the same ranks.

A rank that cannot go on sends what its peers wait for all the same, and in the tail that it is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor as TorchDTensor

from shardwright.comm.functional import reduce_over, start_sum
from shardwright.comm.in_passing import tell_in_passing
from shardwright.comm.told import told
from shardwright.compat import DisableTorchFunctionSubclass, axis_names, is_memory_shared, modes_on
from shardwright.compat.fully_shard.parameters import managing_unit
from shardwright.context.submesh import groups_above_one
from shardwright.errors import ParallelError
from shardwright.grads.alike import NUMBERS, are_alike, in_numbers
from shardwright.grads.buckets import Bucket, Kind, Plan, Summed
from shardwright.grads.other_layouts import home_on_shared_axes
from shardwright.grads.parameters import name_list
from shardwright.grads.state import GradientState
from shardwright.tensor.autograd import taken_at_once

_REASON = "sum gradients"
_LOST = (
    "a rank of {} cannot go on with the sums of its gradients, as its own error says; those of this step are "
    "lost\n  fix: zero_grad(), and make another GradientSynchronizer, on every rank"
)
_FLAGS = 3  # that are told of each parameter


class _Filled:
    """The terms of one bucket in one backward: each is copied into the message when it is complete.

    So it is read while it is near, and its own memory is free before the next one is made.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.there: set[int] = set()  # members whose terms are in the message
        self.wait: Callable[[], Tensor] | None = None  # what gives the sums, once it was sent
        self._message: list[Tensor] = []  # the whole of it, then a view for each member, then the tail

    @property
    def complete(self) -> bool:
        return len(self.there) == len(self.bucket.members)

    def put(self, at: int, term: Tensor | None) -> None:
        """This rank's term of a member; None counts as zeros."""
        if not self._message:
            self._message = self._empty()
        place = self._message[1 + at]
        if term is None:
            place.zero_()
        else:
            place.copy_(term)
        self.there.add(at)

    def send(self, tail: Tensor | None) -> None:
        """Post the sum, with what the tail says. The message is the gradients' own from now on."""
        if tail is not None:
            self._message[-1].copy_(tail)
        self.wait = _started(self._message[0], self.bucket.members[0])
        self._message = []

    def _empty(self) -> list[Tensor]:
        bucket = self.bucket
        tail = _FLAGS * len(bucket.tells or ()) + (NUMBERS if bucket.asks is not None else 0)
        whole = None if modes_on() else bucket.memory  # what a mode records is for every step
        if whole is None or is_memory_shared(whole):
            size = sum(bucket.sizes) + tail
            whole = torch.empty(size, dtype=bucket.kind.dtype, device=bucket.kind.device)
            bucket.memory = None if modes_on() else whole
        return [whole, *self.shaped(whole), whole[whole.numel() - tail :]]

    def shaped(self, whole: Tensor) -> list[Tensor]:
        """A view for each member."""
        parts = whole[: sum(self.bucket.sizes)].split(self.bucket.sizes)
        members = self.bucket.members
        return [x.view(m.placed._local_tensor.shape) for x, m in zip(parts, members, strict=True)]


class OverlappedSum:
    """One backward whose gradients are summed while it goes on, in the buckets of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._filled = [_Filled(bucket) for bucket in plan.buckets]
        self._had: dict[int, tuple[bool, bool]] = {}  # by parameter: a term, and what is no term
        self._late: dict[int, Tensor] = {}  # by parameter: the sum of its terms after the first
        self._finished: set[int] = set()  # crowds: nothing of theirs is left to be moved or summed here
        self._next = 0
        self._ends = False
        self._is_lost = False

    @property
    def took_any(self) -> bool:
        """Is there a gradient that is in a message alone?"""
        return bool(self._had)

    def listen(self) -> Callable[[], None]:
        """Take each gradient as it becomes complete. Returns: what ends that."""
        leaves = [entry.parameter for bucket in self._plan.buckets for entry in bucket.members]
        ids = set(map(id, leaves))
        if not taken_at_once.isdisjoint(ids):
            raise ParallelError("a block of `overlapped()` stands in another one of the same parameters")
        with DisableTorchFunctionSubclass():  # each would go through Python twice
            hooks = [leaf.register_post_accumulate_grad_hook(self._completed) for leaf in leaves]
        taken_at_once.update(ids)

        def stop() -> None:
            taken_at_once.difference_update(ids)
            for hook in hooks:
                hook.remove()

        return stop

    def _completed(self, parameter: Tensor) -> None:
        number, at = self._plan.place[id(parameter)]
        filled = self._filled[number]
        if id(parameter) in self._had:  # also where its bucket is gone
            self._keep(filled.bucket.kind, filled.bucket.members[at])
            return
        self._take(filled, at)
        if len(filled.there) == len(filled.bucket.members):
            self._send()

    def _keep(self, kind: Kind, entry: Summed) -> None:
        """Keep a term that came after the first; what is no term has been added to its kin by torch."""
        a_term, _ = self._had[id(entry.parameter)]
        if not a_term:
            return
        state = entry.state()
        if not _fits(kind, entry, state):
            raise ParallelError(
                f"{entry.name} got a gradient of another layout or dtype after its first was sent: run one "
                "backward in a block of `overlapped()`, and those before it outside"
            )
        term, before = entry.term(state, entry.pending), self._late.get(id(entry.parameter))
        self._late[id(entry.parameter)] = term.clone() if before is None else before + term
        entry.parameter.grad = None

    def _take(self, filled: _Filled, at: int) -> None:
        """This rank's term of a sum: from now on it is in the message alone."""
        entry = filled.bucket.members[at]
        term = entry.usual_term()
        if term is not None:
            self._had[id(entry.parameter)] = True, False
            filled.put(at, term)
            entry.parameter.grad = None
            return
        state = entry.state()
        if state.other:
            entry.parameter.grad = home_on_shared_axes(entry.gradient, entry.placed)
            state = entry.state()
        fits = _fits(filled.bucket.kind, entry, state)
        a_term = state.exists and fits
        self._had[id(entry.parameter)] = a_term, not fits
        if a_term and state.pending == entry.pending and managing_unit(entry.placed) is None:
            entry.usual = entry.gradient._spec
        filled.put(at, entry.term(state, entry.pending) if a_term else None)
        if fits:
            entry.parameter.grad = None

    def _send(self) -> None:
        """Post every bucket that is complete and whose turn it is."""
        while self._next < len(self._filled) and self._filled[self._next].complete:
            filled = self._filled[self._next]
            if filled.bucket.tells is not None and not self._ends:
                return
            filled.send(self._tail(filled.bucket))
            self._next += 1

    def _tail(self, bucket: Bucket) -> Tensor | None:
        if bucket.tells is None:
            return None
        if self._is_lost:
            said = torch.full((_FLAGS * len(bucket.tells),), math.inf)
            rest = () if bucket.asks is None else (in_numbers(None, said.dtype, said.device),)
            return torch.cat((said, *rest))
        ids = [id(entry.parameter) for entry in bucket.tells]
        flags = [float(flag) for each in ids for flag in (*self._had[each], each in self._late)]
        said = torch.tensor(flags, dtype=bucket.kind.dtype, device=bucket.kind.device)
        if bucket.asks is None:
            return said
        digest, finished = bucket.asks.states()
        if finished:
            self._finished.add(id(bucket.asks))
        return torch.cat((said, in_numbers(digest, said.dtype, said.device)))

    def finish(self, *, static: bool) -> list[tuple[dict[str, TorchDTensor], bool]]:
        """Send what is left, wait for all of it, and give every sum the layout of its parameter.

        Args: static: gradients that no message tells of count as alike on all ranks.
        Returns: parameters that are still to be looked at, and whether all ranks have their gradients alike.
        Raises: ParallelError: some ranks have terms of a gradient where others have a layout of their own; a
            rank is lost.
        """
        self._ends = True
        for filled in self._filled[self._next :]:
            for at in range(len(filled.bucket.members)):
                if at not in filled.there:
                    self._take(filled, at)
            self._send()
        sums = [filled.wait() for filled in self._filled if filled.wait is not None]
        had = self._told(sums)
        wrong = [entry.name for entry, (a_term, other, _) in had if a_term and other]
        if wrong:
            raise ParallelError(
                f"gradients of {name_list(wrong)} have other layouts on some ranks than on their peers; run "
                "the same backward passes on all ranks"
            )
        exists = {id(entry.parameter) for entry, (a_term, _, _) in had if a_term}
        late = self._sums_of_late([entry for entry, (_, _, is_late) in had if is_late])
        found = [({entry.name: entry.parameter for entry, (_, other, _) in had if other}, False)]
        for filled, flat in zip(self._filled, sums, strict=True):
            bucket = filled.bucket
            if bucket.asks is not None:
                alike = are_alike(flat)
                if not alike or id(bucket.asks) not in self._finished:
                    found.append((bucket.asks.parameters, alike))
            for entry, total in zip(bucket.members, filled.shaped(flat), strict=True):
                if id(entry.parameter) in exists:
                    if id(entry.parameter) in late:
                        total = total.add_(late[id(entry.parameter)])  # noqa: PLW2901
                    own = entry.placed._local_tensor
                    entry.put(total if own.is_contiguous() else torch.empty_like(own).copy_(total))
        asked = {id(bucket.asks) for bucket in self._plan.buckets}
        found += [(crowd.parameters, static) for crowd in self._plan.left if id(crowd) not in asked]
        return [each for each in found if each[0]]

    def give_up(self) -> None:
        """Send what is left as zeros, and that this rank is lost: the others would wait for it."""
        left = self._filled[self._next :]
        if not left:
            return
        self._is_lost, self._next = True, len(self._filled)
        for filled in left:
            for at in range(len(filled.bucket.members)):
                filled.put(at, None)
            filled.send(self._tail(filled.bucket))
        tell_in_passing(lambda: [filled.wait() for filled in self._filled if filled.wait is not None])

    def _sums_of_late(self, entries: Sequence[Summed]) -> dict[int, Tensor]:
        """What came after the first terms, on any rank, summed over the ranks; by parameter."""
        buckets: dict[Kind, Bucket] = {}
        for entry in entries:
            kind = self._plan.buckets[self._plan.place[id(entry.parameter)][0]].kind
            buckets.setdefault(kind, Bucket(kind)).add(entry)
        started = [_Filled(bucket) for bucket in buckets.values()]
        for filled in started:
            for at, entry in enumerate(filled.bucket.members):
                filled.put(at, self._late.get(id(entry.parameter)))
            filled.send(None)
        return {
            id(entry.parameter): total
            for filled in started
            if filled.wait is not None
            for entry, total in zip(filled.bucket.members, filled.shaped(filled.wait()), strict=True)
        }

    def _told(self, sums: Sequence[Tensor]) -> list[tuple[Summed, tuple[bool, bool, bool]]]:
        """Of each parameter: has any rank a term of its gradient, something else, a term after the first?"""
        found: list[tuple[Summed, tuple[bool, bool, bool]]] = []
        for bucket, flat in zip(self._plan.buckets, sums, strict=True):
            if bucket.tells is not None:
                tail = flat if bucket.asks is None else flat[:-NUMBERS]
                numbers = told(tail[-_FLAGS * len(bucket.tells) :])
                if math.inf in numbers:
                    raise ParallelError(_LOST.format(axis_names(bucket.members[0].placed._spec.mesh)))
                flags = [number != 0 for number in numbers]
                of_each = zip(*(flags[at::_FLAGS] for at in range(_FLAGS)), strict=True)
                found += zip(bucket.tells, of_each, strict=True)
        return found


def _fits(kind: Kind, entry: Summed, state: GradientState) -> bool:
    """Whether this rank's gradient is a term of the bucket's sum, or none."""
    if state.missing:
        return True
    terms_elsewhere = any(have and not want for have, want in zip(state.pending, entry.pending, strict=True))
    return not (state.other or terms_elsewhere) and entry.gradient.dtype == kind.dtype


def _started(flat: Tensor, member: Summed) -> Callable[[], Tensor]:
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
