"""Attention in a ring: keys and values travel from rank to rank, each attends with the queries that it has.

Source: Liu, Zaharia, Abbeel, arXiv 2310.01889, section 3; the balanced order of the sequence: `ZigZag`
(Brandon et al., "Striped Attention", arXiv 2311.09431, on why a plain cut is not).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.comm.ring import Passing, Ring
from shardwright.errors import PlanError
from shardwright.rules.held_label import Held
from shardwright.tensor.attention.blocks import Block, Sees, Span, blocks, causal_blocks, spans
from shardwright.tensor.attention.kernel import Seen, attend, attend_backward
from shardwright.tensor.attention.partial_results import Merged


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call as a rank of the ring sees it.

    Args:
        ring: whom it hears and tells.
        queries: the positions that this rank holds.
        keys: those that each rank of the ring holds.
        causal: a query sees the keys that are not later than it.
        scale: of the scores.
        mask: of the own queries and all keys, see `kernel.Seen`; or None.
    """

    ring: Ring
    queries: Held
    keys: tuple[Held, ...]
    causal: bool
    scale: float
    mask: Tensor | None = None

    def shown(self, source: int, query: Tensor) -> Iterator[tuple[Block, Seen]]:
        """What is to be computed with the part of one rank; nothing without rows, heads or queries."""
        keys = self.keys[source]
        if not (query.numel() and keys.length):
            return
        if self.causal:
            yield from ((block, self._causal(block, keys)) for block in causal_blocks(self.queries, keys))
        elif self.mask is None:
            whole = Block(slice(0, self.queries.length), slice(0, keys.length), Sees.ALL)
            yield whole, Seen(None, False, self.scale)
        else:
            yield from self._masked(self.mask, keys)

    def _causal(self, block: Block, keys: Held) -> Seen:
        if block.sees is not Sees.SOME:
            return Seen(None, block.sees is Sees.EARLIER, self.scale)
        rows, columns = self.queries.positions()[block.queries], keys.positions()[block.keys]
        return Seen((rows[:, None] >= columns[None, :])[None, None], False, self.scale)

    def _masked(self, mask: Tensor, keys: Held) -> Iterator[tuple[Block, Seen]]:
        """Blocks of which some pair is seen: windows and documents skip the rest."""

        def sees(queries: Span, span: Span) -> Sees:
            part = _columns(_rows(mask, slice(queries.at, queries.at + queries.length)), (span,))
            shown = part if part.dtype is torch.bool else part != -torch.inf
            return Sees.ALL if bool(shown.any()) else Sees.NONE

        pieces = spans(keys)
        for block in blocks(spans(self.queries), pieces, sees):
            inside = [span for span in pieces if block.keys.start <= span.at < block.keys.stop]
            part = _columns(_rows(mask, block.queries), inside)
            yield block, Seen(part, False, self.scale)


def _rows(mask: Tensor, queries: slice) -> Tensor:
    return mask if mask.shape[2] == 1 else mask[:, :, queries]


def _columns(mask: Tensor, keys: Sequence[Span]) -> Tensor:
    if mask.shape[3] == 1:
        return mask
    parts = [mask.narrow(3, span.start, span.length) for span in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


class Pair(NamedTuple):
    """Keys and values of one rank, or their gradients."""

    key: Tensor
    value: Tensor

    def flat(self) -> Tensor:
        """Both in one stretch of memory, as they travel."""
        return torch.cat([self.key.reshape(-1), self.value.reshape(-1)])

    def shaped(self, flat: Tensor, length: int) -> Pair:
        """What has travelled, as keys and values like these, `length` of them."""
        key, value = ((*x.shape[:2], length, x.shape[3]) for x in self)
        keys = flat.numel() * self.key.shape[3] // max(1, self.key.shape[3] + self.value.shape[3])
        return Pair(flat[:keys].view(key), flat[keys:].view(value))

    def numel(self, length: int) -> int:
        """How many elements travel of a part of this length."""
        rows = self.key.shape[0] * self.key.shape[1] * length
        return rows * (self.key.shape[3] + self.value.shape[3])


def _rounds(call: Call, own: Pair) -> Iterator[tuple[int, Pair]]:
    """Whose part is at hand and the part, one after another; the next travels while one is worked on."""
    ring, at_hand, flat = call.ring, own, own.flat() if len(call.keys) > 1 else own.key
    for step in range(len(call.keys)):
        source = ring.source(step)
        passing = _next(call, own, flat, step)
        yield source, at_hand
        if passing is not None:
            flat = passing.wait()
            at_hand = own.shaped(flat, call.keys[ring.source(step + 1)].length)


def _next(call: Call, own: Pair, flat: Tensor, step: int) -> Passing | None:
    if step + 1 == len(call.keys):
        return None
    return call.ring.pass_on(flat, own.numel(call.keys[call.ring.source(step + 1)].length))


def ring_forward(query: Tensor, own: Pair, call: Call) -> tuple[Tensor, Tensor]:
    """[b, h, l/n, d] and keys, values [b, k, s/n, ...] -> [b, h, l/n, v], logs of the sums [b, h, l/n].

    Cost: each rank sends n - 1 parts of keys and values, (n - 1)/n of all.
    """
    merged = Merged(query, own.value.shape[3])
    for source, part in _rounds(call, own):
        for block, seen in call.shown(source, query):
            keys, values = part.key[:, :, block.keys], part.value[:, :, block.keys]
            merged.add(block.queries, attend(query[:, :, block.queries], keys, values, seen))
    return merged.finished()


def ring_backward(
    grad: Tensor, query: Tensor, own: Pair, done: tuple[Tensor, Tensor], call: Call
) -> tuple[Tensor, Pair]:
    """The gradients of the own queries, keys and values, in float32 at least.

    The terms for a part follow it: each rank adds its own to those of the ranks before and passes them on
    while it works on the next part; the last one sends them home. The owner's stay where they are.
    Cost: each rank sends n - 1 parts of keys and values, and as many of their gradients.
    """
    terms = Terms(query, own, call)
    mine = under_way = None
    for step, (source, part) in enumerate(_rounds(call, own)):
        flat = terms.made(grad, part, done, source)
        if step == 0:
            mine = flat
            continue
        if under_way is not None:
            flat += under_way.wait()
        size = own.numel(call.keys[call.ring.source(step + 1)].length)
        under_way = call.ring.pass_on(flat, size, lane=1)
    return terms.of_query, own.shaped(_sum(mine, under_way), call.keys[call.ring.own].length)


def _sum(mine: Tensor | None, under_way: Passing | None) -> Tensor:
    """The owner's terms and those that come home; there is a step, so there are the owner's."""
    if mine is None:
        raise PlanError("a ring has at least one rank")
    return mine if under_way is None else mine.add_(under_way.wait())


class Terms:
    """The gradient of the own queries as it grows, and terms for the parts that come by."""

    def __init__(self, query: Tensor, own: Pair, call: Call) -> None:
        self._query, self._own, self._call = query, own, call
        self._wide = torch.promote_types(query.dtype, torch.float32)
        self._rows = slice(0, query.shape[2])
        self._of_query: Tensor | None = None

    @property
    def of_query(self) -> Tensor:
        """The gradient of the own queries so far."""
        if self._of_query is None:
            self._of_query = self._query.new_zeros(self._query.shape, dtype=self._wide)
        return self._of_query

    def made(self, grad: Tensor, part: Pair, done: tuple[Tensor, Tensor], source: int) -> Tensor:
        """The terms of a part's gradients that the own queries make, flat; theirs are added to `of_query`."""
        length = self._call.keys[source].length
        flat = self._query.new_empty(self._own.numel(length), dtype=self._wide)
        found, empty = self._own.shaped(flat, length), True
        for block, seen in self._call.shown(source, self._query):
            rows, keys = block.queries, block.keys
            of_query, of_key, of_value = attend_backward(
                grad[:, :, rows],
                self._query[:, :, rows],
                part.key[:, :, keys],
                part.value[:, :, keys],
                (done[0][:, :, rows], done[1][:, :, rows]),
                seen,
            )
            self._add(rows, of_query)
            if empty and keys == slice(0, length):
                found.key.copy_(of_key)
                found.value.copy_(of_value)
            else:
                if empty:
                    flat.zero_()
                found.key[:, :, keys] += of_key
                found.value[:, :, keys] += of_value
            empty = False
        return flat.zero_() if empty else flat

    def _add(self, rows: slice, of_query: Tensor) -> None:
        """The first of all rows is in memory of its own."""
        if self._of_query is None and rows == self._rows and of_query.dtype == self._wide:
            self._of_query = of_query
        else:
            self.of_query[:, :, rows] += of_query
