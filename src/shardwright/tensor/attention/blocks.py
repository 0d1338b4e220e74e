"""Which of a rank's queries see which of the keys that it was handed, as few rectangles. Integers only.

A kernel call per pair of pieces would be many small ones; neighbouring pieces that see alike are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from typing import NamedTuple

from shardwright.remember import remembered
from shardwright.rules.held_label import Held

# Where two parts have more pairs of pieces than this, one call with a mask is cheaper than one for each.
_FEW_PAIRS = 64


class Sees(Enum):
    """How the queries of a block see its keys."""

    NONE = 0
    ALL = 1  # every query every key
    EARLIER = 2  # query i the keys 0 .. i, counted within the block
    SOME = 3  # only the positions tell


class Span(NamedTuple):
    """Some neighbouring local indices, and where the first stands in the whole sequence."""

    at: int
    length: int
    start: int

    @property
    def stop(self) -> int:
        """One after the last of them in the whole sequence."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Block:
    """Some neighbouring queries and keys, by local indices, and how these see those."""

    queries: slice
    keys: slice
    sees: Sees

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key a kernel computes."""
        queries, keys = _length(self.queries), _length(self.keys)
        return queries * (queries + 1) // 2 if self.sees is Sees.EARLIER else queries * keys


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def spans(held: Held) -> tuple[Span, ...]:
    """The contiguous pieces of what a rank holds, in local order."""
    found, at = [], 0
    for start, length in held.pieces:
        found.append(Span(at, length, start))
        at += length
    return tuple(found)


@remembered(4096)
def causal_blocks(queries: Held, keys: Held) -> tuple[Block, ...]:
    """The blocks that a causal call has to compute: key j is seen by the queries from position j on.

    What no query sees is in no block. With `ZigZag` over n ranks that is half of a part, whoever hands it.
    """
    if not (queries.length and keys.length):
        return ()
    if queries.runs == keys.runs and all(a.stop <= b.start for a, b in pairwise(spans(queries))):
        return (Block(slice(0, queries.length), slice(0, keys.length), Sees.EARLIER),)
    if len(queries.pieces) * len(keys.pieces) > _FEW_PAIRS:
        return (Block(slice(0, queries.length), slice(0, keys.length), Sees.SOME),)
    return blocks(spans(queries), spans(keys), _causal)


def _causal(queries: Span, keys: Span) -> Sees:
    if keys.start >= queries.stop:
        return Sees.NONE
    if keys.stop - 1 <= queries.start:
        return Sees.ALL
    # Keys later than the last query of an aligned block are cut off by the kernel itself.
    return Sees.EARLIER if keys.start == queries.start else Sees.SOME


def blocks(
    queries: Sequence[Span], keys: Sequence[Span], sees: Callable[[Span, Span], Sees]
) -> tuple[Block, ...]:
    """The blocks of two parts by a question about two pieces; neighbours that see alike are joined."""
    rows = [(span, tuple(sees(span, key) for key in keys)) for span in queries]
    found: list[Block] = []
    for group in _alike(rows):
        span = slice(group[0][0].at, group[-1][0].at + group[-1][0].length)
        found += [Block(span, columns, kind) for columns, kind in _columns(keys, group[0][1])]
    return tuple(found)


_Row = tuple[Span, tuple[Sees, ...]]


def _alike(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Neighbouring queries that see the same pieces, all of them or nothing of each."""
    simple = {Sees.NONE, Sees.ALL}
    group: list[_Row] = []
    for row in rows:
        if group and not (row[1] == group[-1][1] and simple.issuperset(row[1])):
            yield group
            group = []
        group.append(row)
    yield group


def _columns(keys: Sequence[Span], kinds: Sequence[Sees]) -> Iterator[tuple[slice, Sees]]:
    """Neighbouring keys that are seen whole as one stretch; others piece by piece."""
    pairs = zip(keys, kinds, strict=True)
    for kind, members in groupby(pairs, key=lambda pair: pair[1]):
        spans_of = [span for span, _ in members]
        if kind is Sees.ALL:
            yield slice(spans_of[0].at, spans_of[-1].at + spans_of[-1].length), kind
        elif kind is not Sees.NONE:
            yield from ((slice(span.at, span.at + span.length), kind) for span in spans_of)
