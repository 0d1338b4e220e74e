"""Buckets: many tensors in one flat buffer with an equal share per rank, in which no block is cut.

A sharded optimizer or a quantizer works on blocks (rows, tiles, whole tensors) that must stay on one rank.
Gathered, the bucket is one buffer in which each tensor is one stretch, so nothing is copied; a rank's share
of a tensor is `Ragged`. What the blocks cost is padding, and it is stated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm

from shardwright.errors import PlanError, as_several, refuse_no_number
from shardwright.placement.ragged import Ragged

ALIGNMENT = 16  # bytes: what vector loads and NCCL's fast paths ask for
_TRIES, _MULTIPLES = 64, 8  # shares to try: one step after the other, and multiples of the blocks
_FEW, _NODES = 12, 2000  # tensors whose orders are searched, and how long


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each tensor lies in a bucket of `ranks` equal shares.

    share: elements of the bucket on each rank. starts: where each tensor begins in the bucket. lengths: its
    elements. padding: elements of the bucket that belong to no tensor.
    """

    ranks: int
    share: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def padding(self) -> int:
        """Elements of the whole bucket that belong to no tensor."""
        return self.ranks * self.share - sum(self.lengths)

    def held(self, tensor: int) -> tuple[int, ...]:
        """How many elements of a tensor each rank holds. Raises: PlanError: there is no such tensor."""
        if not 0 <= tensor < len(self.starts):
            raise PlanError(f"tensor={tensor} is none of the {len(self.starts)} of this bucket")
        start, stop = self.starts[tensor], self.starts[tensor] + self.lengths[tensor]
        edges = [min(max(rank * self.share, start), stop) for rank in range(self.ranks + 1)]
        return tuple(high - low for low, high in pairwise(edges))

    def placement(self, tensor: int, dims: Sequence[int] = (0,)) -> Ragged:
        """The placement of a tensor, flattened over `dims` (all of them, or the first if blocks are rows)."""
        held = self.held(tensor)
        if not sum(held):
            return Ragged((1,) * self.ranks, dims)
        unit = gcd(*held)
        return Ragged(tuple(count // unit for count in held), dims)


def pack_blocks(lengths: Sequence[int], blocks: Sequence[int], ranks: int, *, itemsize: int) -> Packing:
    """Tensors of these lengths in one bucket, with the least share per rank that was found.

    Every rank's share is a multiple of 16 bytes, and a border between two shares cuts no block. Tensors are
    put in another order where that saves padding; each stays one stretch of the bucket.

    Args:
        lengths: elements of each tensor.
        blocks: elements of a block of each tensor: a row's, a tile's, or its length to keep it whole. It
            divides the length.
        ranks: how many ranks share the bucket.
        itemsize: bytes of an element.

    Raises:
        PlanError: a block does not divide its tensor; the arguments do not fit together.
    Cost: pure; some milliseconds for a thousand tensors of a few shapes.
    """
    lengths, blocks = _checked(lengths, blocks, ranks, itemsize)
    kinds = Counter((length, block) for length, block in zip(lengths, blocks, strict=True) if length)
    step = lcm(ALIGNMENT, itemsize) // itemsize
    for share in _shares(kinds, ranks, step):
        placed = _place(kinds, share, ranks)
        if placed is not None:
            return Packing(ranks, share, _in_order(lengths, blocks, placed), tuple(lengths))
    raise PlanError("no bucket was found")  # unreachable: the last share holds everything


def _checked(
    lengths: Sequence[int], blocks: Sequence[int], ranks: int, itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    fix = "whole numbers, one for each tensor"
    lengths = as_several("pack_blocks: lengths", lengths, PlanError, fix=fix)
    blocks = as_several("pack_blocks: blocks", blocks, PlanError, fix=fix)
    refuse_no_number("pack_blocks: ranks", ranks, PlanError, whole=True)
    refuse_no_number("pack_blocks: itemsize", itemsize, PlanError, whole=True)
    if len(lengths) != len(blocks):
        raise PlanError(
            f"pack_blocks: {len(lengths)} lengths, {len(blocks)} blocks; give a block for each tensor"
        )
    if not all(isinstance(number, int) for number in (*lengths, *blocks)):
        raise PlanError(f"pack_blocks: lengths and blocks are whole numbers, got {lengths} and {blocks}")
    for index, (length, block) in enumerate(zip(lengths, blocks, strict=True)):
        if length < 0 or (length and (block < 1 or length % block)):
            raise PlanError(
                f"pack_blocks: a block of {block} does not divide tensor {index}, of {length} elements"
            )
    return lengths, blocks


Kind = tuple[int, int]  # length and block
Kinds = Counter[Kind]
Placed = list[tuple[Kind, int]]  # and where it starts


def _shares(kinds: Kinds, ranks: int, step: int) -> Iterator[int]:
    """Shares to try, ascending: the least that could do and what follows, then multiples of the blocks."""
    total = sum(length * count for (length, _), count in kinds.items())
    largest = max((block for _, block in kinds), default=0)
    least = _up(max(-(-total // ranks), largest), step)
    tries = {least + i * step for i in range(_TRIES)}
    common = step
    for block in sorted({block for _, block in kinds}):
        common = lcm(common, block)
        for unit in (lcm(block, step), common):
            tries.update(_up(least, unit) + i * unit for i in range(_MULTIPLES))
    tries.add(_up(max(total, 1), step))  # everything on one rank
    return iter(sorted(tries))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _place(kinds: Kinds, share: int, ranks: int) -> Placed | None:
    """Kinds and starts, one tensor after the other; None if no order was found in which they fit."""
    placed = _first_choices(kinds, share, ranks)
    if placed is None and sum(kinds.values()) <= _FEW:
        return _Orders(share, ranks).fit(dict(kinds), 0)
    return placed


def _choices(left: dict[Kind, int], at: int, share: int) -> list[tuple[Kind, int]]:
    """What may come next and where it starts, the best first.

    The least padding here; then the largest block, which finds its place hardest later; then the longest.
    """
    starts = ((kind, _start(kind, at, share)) for kind in left)
    possible = [(kind, start) for kind, start in starts if start is not None]
    return sorted(possible, key=lambda choice: (choice[1], -choice[0][1], -choice[0][0]))


def _first_choices(kinds: Kinds, share: int, ranks: int) -> Placed | None:
    """Always the best that may come next."""
    left, at, placed = dict(kinds), 0, list[tuple[Kind, int]]()
    while left:
        choices = _choices(left, at, share)
        if not choices:
            return None
        kind, start = choices[0]
        at = start + kind[0]
        if at > ranks * share:
            return None
        placed.append((kind, start))
        _take(left, kind)
    return placed


class _Orders:
    """A search through the orders of a few tensors, which gives up after a while."""

    def __init__(self, share: int, ranks: int) -> None:
        self.share, self.room, self.budget = share, ranks * share, _NODES

    def fit(self, left: dict[Kind, int], at: int) -> Placed | None:
        """An order in which these fit from `at` on."""
        if not left:
            return []
        self.budget -= 1
        needed = sum(length * count for (length, _), count in left.items())
        for kind, start in _choices(left, at, self.share):
            if start + needed > self.room or self.budget < 0:
                return None
            rest = dict(left)
            _take(rest, kind)
            found = self.fit(rest, start + kind[0])
            if found is not None:
                return [(kind, start), *found]
        return None


def _take(left: dict[Kind, int], kind: Kind) -> None:
    left[kind] -= 1
    if not left[kind]:
        del left[kind]


def _start(kind: Kind, at: int, share: int) -> int | None:
    """The first start from `at` on at which no border of two shares cuts a block; None if there is none."""
    length, block = kind
    border = _up(at, share)
    for start in (at, at + (border - at) % block, border, border + share % block):
        first = start // share * share + share  # the first border inside the tensor, if it reaches that far
        stop = start + length
        cuts_none = (first - start) % block == 0 and (stop <= first + share or share % block == 0)
        if stop <= first or cuts_none:
            return start
    return None


def _in_order(lengths: Sequence[int], blocks: Sequence[int], placed: Placed) -> tuple[int, ...]:
    """The start of every tensor; tensors of one kind in the order given."""
    of_kind: dict[Kind, list[int]] = {}
    for kind, start in reversed(placed):
        of_kind.setdefault(kind, []).append(start)
    return tuple(
        of_kind[length, block].pop() if length else 0 for length, block in zip(lengths, blocks, strict=True)
    )
