"""What one rank does in an exchange: views to send, views to fill, and how many elements go where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from shardwright.index.grid import overlaps
from shardwright.index.overlap import Strided, covers_in_order, paired_views, source_views, target_views
from shardwright.plan.holders import Coords, Map
from shardwright.plan.peers import shared_with_peers
from shardwright.plan.steps import Exchange, LocalMove, Place


@dataclass(frozen=True)
class Memory:
    """Shape and stride that a local tensor must have for views into it to be right."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Move:
    """What one rank copies inside itself: (from, to) views. nothing: the result is the source as it is."""

    source: Memory
    target: Memory
    views: tuple[tuple[Strided, Strided], ...]
    nothing: bool


@dataclass(frozen=True)
class Transfer:
    """One rank's side of an exchange.

    members: coordinates in the order of the wire, this rank included. send, receive: views per member, read
    and written in this order. keep: (from, to) views of what the rank already holds.
    send_whole: the sent views are the source's memory from first to last, so nothing is packed;
    receive_whole: likewise for the result; then the own part goes through the wire's buffer too, not `keep`.
    own: what the rank already holds, wherever it goes through. gather: what is for one is for all members.
    terms: how many terms of each element the result has, in a leading dim; 0 where nothing is reduced.
    slot: one term of the result.
    """

    source: Memory
    target: Memory
    members: tuple[Coords, ...]
    send: tuple[tuple[Strided, ...], ...]
    receive: tuple[tuple[Strided, ...], ...]
    keep: tuple[tuple[Strided, Strided], ...]
    send_whole: bool
    receive_whole: bool
    own: tuple[tuple[Strided, Strided], ...]
    gather: bool
    terms: int
    slot: Memory

    @cached_property
    def send_counts(self) -> list[int]:
        """Elements for each member."""
        return [sum([prod(view.size) for view in views]) for views in self.send]

    @cached_property
    def receive_counts(self) -> list[int]:
        """Elements from each member."""
        return [sum([prod(view.size) for view in views]) for views in self.receive]


def members_of(step: Exchange, coords: Coords) -> tuple[Coords, ...]:
    """The coordinates that differ from these only on the axes of the exchange, row-major."""
    choices = [
        range(size) if axis in step.axes else (coords[axis],) for axis, size in enumerate(step.source.sizes)
    ]
    return tuple(product(*choices))


def transfer(step: Exchange, coords: Coords, members: Sequence[Coords]) -> Transfer:
    """The side of the rank at `coords`; `members` in the order of the wire."""
    source = step.source
    slot = memory_of(step.target, coords)
    result = _result(step, slot)
    keep, send, receive = [], [], []
    shared = shared_with_peers(step, coords, members)
    for peer, (incoming, outgoing) in zip(members, shared, strict=True):
        shift = _term(step, peer) * (result.numel // step.term_count)
        receive.append(tuple(target_views(incoming, shift)))
        send.append(tuple(source_views(outgoing)))
        if peer == coords:
            keep = [(a, b._replace(start=b.start + shift)) for a, b in paired_views(incoming)]
    whole = covers_in_order([view for views in receive for view in views], result.numel)
    own = list(members).index(coords)
    if not (whole or step.gather):
        send[own] = receive[own] = ()
    sent = send[own : own + 1] if step.gather else send
    memory = memory_of(source, coords)
    packed = covers_in_order([view for views in sent for view in views], memory.numel)
    return Transfer(
        source=memory,
        target=result,
        members=tuple(members),
        send=tuple(send),
        receive=tuple(receive),
        keep=() if whole or step.gather else tuple(keep),
        send_whole=packed,
        receive_whole=whole,
        own=tuple(keep),
        gather=step.gather,
        terms=step.term_count if step.terms else 0,
        slot=slot,
    )


def local_move(step: LocalMove | Place, coords: Coords) -> Move:
    """What the rank at `coords` copies in a step without communication."""
    source, target = step.source, step.target
    views = tuple(paired_views(overlaps(source.cell(coords), target.cell(coords))))
    held, wanted = memory_of(source, coords), memory_of(target, coords)
    return Move(held, wanted, views, held == wanted and all(a == b for a, b in views))


def memory_of(which: Map, coords: Coords) -> Memory:
    """The memory that a map's local tensor has at these coordinates."""
    return Memory(which.local_shape(coords), which.local_stride(coords))


def _result(step: Exchange, slot: Memory) -> Memory:
    if not step.terms:
        return slot
    return Memory((step.term_count, *slot.shape), (slot.numel, *slot.stride))


def _term(step: Exchange, peer: Coords) -> int:
    term = 0
    for axis in step.terms:
        term = term * step.source.sizes[axis] + peer[axis]
    return term
