"""Which way attention over a cut sequence goes: a ring, or an exchange of heads for positions. Pure.

Both leave every rank with 1/n of the work and of the memory. They differ in bytes: with E elements of keys
and values over n ranks a ring sends (n - 1) E in all, whatever the queries; an exchange sends (n - 1)/n of
queries, keys, values and results, which is less where n is large and more where few heads share keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwright.index.stride import stride_like
from shardwright.layout.applied import cut_form
from shardwright.layout.layout import Layout
from shardwright.placement.base import Placement, Replicate
from shardwright.placement.shard import Shard
from shardwright.plan.decide import plan_redistribution
from shardwright.remember import remembered
from shardwright.tensor.algorithms.cut_dim import CutDim, find_cut, reorders

AUTO, RING, EXCHANGE = "auto", "ring", "all_to_all"
WAYS = (AUTO, RING, EXCHANGE)
_HEADS, _SEQUENCE = 1, 2  # of [batch, head, sequence, features]


@dataclass(frozen=True)
class CutCall:
    """An attention call whose queries and keys the same axes cut along the sequence.

    Args:
        query, key, value: the layouts.
        queries, keys: who holds which positions.
    """

    query: Layout
    key: Layout
    value: Layout
    queries: CutDim
    keys: CutDim

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that cut the sequence, in order of application."""
        return self.keys.axes

    @property
    def axis_names(self) -> str:
        """For people and the record."""
        return ", ".join(self.key.axes[axis] for axis in self.axes)

    def ring(self, coords: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks among which the keys of these coords go round, in the order of `keys.held`."""
        ranks = []
        for index in range(len(self.keys.held)):
            at, left = list(coords), index
            for axis in reversed(self.axes):
                left, at[axis] = divmod(left, self.key.sizes[axis])
            ranks.append(self.key.mesh_shape.rank_at(tuple(at)))
        return tuple(ranks)

    @property
    def ring_bytes(self) -> int:
        """What all ranks send in a forward as a ring."""
        whole = [n for axis, n in enumerate(self.key.sizes) if self.key.placements[axis].is_replicated]
        elements = (self.key.numel + self.value.numel) * prod(whole)
        return (len(self.keys.held) - 1) * elements * self.key.itemsize

    @cached_property
    def result(self) -> Layout:
        """The layout of the result: that of the queries, as wide as the values."""
        return self.query.with_shape((*self.query.shape[:3], self.value.shape[3]))

    @cached_property
    def result_as_query(self) -> Layout:
        """The same, in memory as the queries lie; where it has their shape."""
        layout = self.result
        if layout.shape != self.query.shape:
            return layout
        return layout.with_shape(layout.shape, stride_like(layout.shape, self.query.stride))

    def mask_layout(self, mask: Layout) -> Layout:
        """Where a mask [b or 1, h or 1, l or 1, s or 1] must be: the rows of the own queries, every key."""
        sizes = self.query.shape
        placements: list[Placement] = []
        for axis, placement in enumerate(self.query.placements):
            form = cut_form(self.query, axis) if placement.is_partition else None
            fits = form is not None and mask.shape[form[0]] == sizes[form[0]] and form[0] <= _SEQUENCE
            placements.append(placement if fits else Replicate())
        return mask.with_placements(tuple(placements), order=self.query.order_names)


@remembered(1024)
def cut_call(query: Layout, key: Layout, value: Layout) -> CutCall | None:
    """The call, or None where it is none that a ring or an exchange can serve (the rules then do)."""
    if not _fits(query, key, value):
        return None
    queries, keys, values = (find_cut(layout, _SEQUENCE) for layout in (query, key, value))
    if queries is None or keys is None or keys != values or queries.axes != keys.axes:
        return None
    others = [axis for axis in range(len(query.sizes)) if axis not in keys.axes]
    if not all(_alike(axis, query, key, value) for axis in others):
        return None
    return CutCall(query, key, value, queries, keys)


def _fits(query: Layout, key: Layout, value: Layout) -> bool:
    layouts = (query, key, value)
    if any(len(x.shape) != 4 or not x.numel or x.pending_axes for x in layouts):
        return False
    if any(x.mesh_shape != query.mesh_shape or x.dtype != query.dtype for x in layouts):
        return False
    same = query.shape[0] == key.shape[0] and key.shape[:3] == value.shape[:3]
    return same and query.shape[3] == key.shape[3] and query.shape[_HEADS] % key.shape[_HEADS] == 0


def _alike(axis: int, query: Layout, key: Layout, value: Layout) -> bool:
    """Does an axis beside the sequence leave each rank with queries and keys that belong together?"""
    if query.sizes[axis] == 1 and not any(reorders(x, axis) for x in (query, key, value)):
        return True
    forms = [cut_form(x, axis) if x.placements[axis].is_partition else None for x in (query, key, value)]
    if all(x.placements[axis].is_replicated for x in (query, key, value)):
        return True
    first, form = forms[0], forms[1]
    if first is None or form is None or forms[2] != form or first[0] != form[0]:
        return False
    if first[0] == 0 or query.shape[_HEADS] == key.shape[_HEADS]:
        return first[0] in (0, _HEADS) and first == form
    cuts = prod(n for a, n in enumerate(key.sizes) if (cut_form(key, a) or (-1,))[0] == _HEADS)
    return first[0] == _HEADS and first[1] == form[1] == Shard(0) and key.shape[_HEADS] % cuts == 0


@dataclass(frozen=True)
class Exchange:
    """The layouts in which each rank has whole sequences of some heads; what there and back sends."""

    query: Layout
    key: Layout
    value: Layout
    bytes: int


@remembered(1024)
def exchange_of(call: CutCall) -> Exchange | None:
    """The exchange of heads for positions; None where the ranks cannot share out the heads.

    Heads that share keys stay together, so the ranks must divide the heads of the keys; where each head has
    its own, they need not divide, but every rank must get one. Source: Jacobs et al., "DeepSpeed Ulysses",
    arXiv 2309.14509, section 3.
    """
    heads, shared = call.query.shape[_HEADS], call.key.shape[_HEADS]
    others = [a for a, p in enumerate(call.key.placements) if _cuts_heads(call.key, a, p)]
    ranks = len(call.keys.held) * prod(call.key.sizes[axis] for axis in others)
    if shared % ranks and (heads != shared or others or shared < ranks or len(call.axes) > 1):
        return None
    query, key, value = (_by_heads(x, call.axes) for x in (call.query, call.key, call.value))
    moves = [(call.query, query), (call.key, key), (call.value, value)]
    moves.append((query.with_shape(call.result.shape), call.result))
    sent = sum(plan_redistribution(source, target).total_bytes for source, target in moves)
    return Exchange(query, key, value, sent)


def _cuts_heads(layout: Layout, axis: int, placement: Placement) -> bool:
    form = cut_form(layout, axis) if placement.is_partition else None
    return form is not None and form[0] == _HEADS


def _by_heads(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """Heads cut over these axes, after those that cut them already."""
    placements = [Shard(_HEADS) if axis in axes else p for axis, p in enumerate(layout.placements)]
    order = [axis for axis in layout.order if axis not in axes] + list(axes)
    return layout.with_placements(tuple(placements), order=[layout.axes[axis] for axis in order])


def cheaper(call: CutCall) -> str:
    """The way that sends fewer bytes; at equal bytes the ring, whose messages travel while it computes."""
    exchange = exchange_of(call)
    return RING if exchange is None or call.ring_bytes <= exchange.bytes else EXCHANGE
