"""Attention in a ring: keys and values travel from rank to rank, each attends with the queries that it has.

Source: Liu, Zaharia, Abbeel, arXiv 2310.01889, section 3; the balanced order of the sequence: `ZigZag`
(Brandon et al., "Striped Attention", arXiv 2311.09431, on why a plain cut is not).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.comm.ring import Passing, Ring
from shardwright.rules.held_label import Held
from shardwright.tensor.attention.blocks import Block, Sees, Span, blocks, causal_blocks, spans
from shardwright.tensor.attention.kernel import Seen, attend, attend_backward, finite, in_rows, piece
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

    def shown(self, source: int, query: Tensor) -> Iterable[tuple[Block, Seen]]:
        """What is to be computed with the part of one rank; nothing without rows, heads or queries."""
        keys = self.keys[source]
        if not (query.numel() and keys.length):
            return ()
        if self.causal:
            return [(block, self._causal(block, keys)) for block in causal_blocks(self.queries, keys)]
        if self.mask is None:
            whole = Block(slice(0, self.queries.length), slice(0, keys.length), Sees.ALL)
            return [(whole, Seen(None, False, self.scale))]
        return self._masked(self.mask, keys)

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
    return mask if mask.shape[2] == 1 else piece(mask, queries)


def _columns(mask: Tensor, keys: Sequence[Span]) -> Tensor:
    if mask.shape[3] == 1:
        return mask
    parts = [mask.narrow(3, span.start, span.length) for span in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


class Pair(NamedTuple):
    """Keys and values of one rank, or their gradients."""

    key: Tensor
    value: Tensor

    def in_rows(self) -> Pair:
        """As the kernel takes them."""
        return Pair(in_rows(self.key), in_rows(self.value))

    def flat(self) -> Tensor:
        """Both in one stretch of memory, as they travel."""
        return torch.cat([self.key.reshape(-1), self.value.reshape(-1)])

    def shaped(self, flat: Tensor, length: int) -> Pair:
        """What has travelled, as keys and values like these, `length` of them."""
        batch, heads, _, width = self.key.shape
        keys = batch * heads * length * width
        key, value = flat.split_with_sizes((keys, flat.numel() - keys))
        return Pair(
            key.view(batch, heads, length, width), value.view(batch, heads, length, self.value.shape[3])
        )

    def numel(self, length: int) -> int:
        """How many elements travel of a part of this length."""
        batch, heads, _, width = self.key.shape
        return batch * heads * length * (width + self.value.shape[3])


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
    query, own = in_rows(query), own.in_rows()
    for source, part in _rounds(call, own):
        for block, seen in call.shown(source, query):
            rows, keys = block.queries, block.keys
            found = attend(piece(query, rows), piece(part.key, keys), piece(part.value, keys), seen)
            merged.add(rows, found)
    return merged.finished()


def ring_backward(
    grad: Tensor, query: Tensor, own: Pair, done: tuple[Tensor, Tensor], call: Call
) -> tuple[Tensor, Pair]:
    """The gradients of the own queries, keys and values, in float32 at least.

    The terms for a part follow it: each rank adds its own to those of the ranks before and passes them on
    while it works on the next part; the last one sends them home. The owner's stay where they are.
    Cost: each rank sends n - 1 parts of keys and values, and as many of their gradients.
    """
    own = own.in_rows()
    terms = Terms(grad, query, own, done, call)
    mine: list[Made] = []
    passing: Passing | None = None
    for step, (source, part) in enumerate(_rounds(call, own)):
        made = terms.of_part(part, source)
        if step == 0:
            mine = made
            continue
        flat = terms.summed(made, source, passing)
        size = own.numel(call.keys[call.ring.source(step + 1)].length)
        passing = call.ring.pass_on(flat, size, lane=1)
    flat = terms.summed(mine, call.ring.own, passing)
    return terms.of_query, own.shaped(flat, call.keys[call.ring.own].length)


class Made(NamedTuple):
    """Terms of the gradients of some keys and values of a part."""

    keys: slice
    of_key: Tensor
    of_value: Tensor


class Terms:
    """The gradient of the own queries as it grows, and terms for the parts that come by."""

    def __init__(
        self, grad: Tensor, query: Tensor, own: Pair, done: tuple[Tensor, Tensor], call: Call
    ) -> None:
        self._query, self._own, self._call = query, own, call
        self._rows_of = (in_rows(grad), in_rows(query), in_rows(done[0]), finite(done[1]))
        self._wide = torch.promote_types(query.dtype, torch.float32)
        self._rows = slice(0, query.shape[2])
        self._of_query: Tensor | None = None

    @property
    def of_query(self) -> Tensor:
        """The gradient of the own queries so far."""
        if self._of_query is None:
            self._of_query = self._query.new_zeros(self._query.shape, dtype=self._wide)
        return self._of_query

    def of_part(self, part: Pair, source: int) -> list[Made]:
        """The terms of a part's gradients that the own queries make; theirs are added to `of_query`."""
        found = []
        for block, seen in self._call.shown(source, self._query):
            rows, keys = block.queries, block.keys
            grad, query, out, logs = [piece(x, rows) for x in self._rows_of]
            given = (grad, query, piece(part.key, keys), piece(part.value, keys), (out, logs))
            of_query, of_key, of_value = attend_backward(*given, seen)
            self._add(rows, of_query)
            found.append(Made(keys, of_key, of_value))
        return found

    def summed(self, made: list[Made], source: int, passing: Passing | None) -> Tensor:
        """Flat, as it travels: these terms of a part, and those of the ranks before, in their memory."""
        length = self._call.keys[source].length
        if passing is None:
            flat = self._query.new_empty(self._own.numel(length), dtype=self._wide)
        else:
            flat = passing.wait()
        of_key, of_value = self._own.shaped(flat, length)
        if passing is None and len(made) == 1 and made[0].keys == slice(0, length):
            of_key.copy_(made[0].of_key)
            of_value.copy_(made[0].of_value)
            return flat
        if passing is None:
            flat.zero_()
        for keys, terms_of_key, terms_of_value in made:
            piece(of_key, keys).add_(terms_of_key)
            piece(of_value, keys).add_(terms_of_value)
        return flat

    def _add(self, rows: slice, of_query: Tensor) -> None:
        """The first of all rows is in memory of its own."""
        if self._of_query is None and rows == self._rows and of_query.dtype == self._wide:
            self._of_query = of_query
        else:
            piece(self.of_query, rows).add_(of_query)
