"""What it costs to bring operands to the placements that a candidate needs: an estimate, not a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shardwright.layout.layout import Layout
from shardwright.placement.base import Partition, Placement, Replicate
from shardwright.rules.call import TensorInfo

_WHOLE = Replicate()


@dataclass(frozen=True, slots=True, order=True)
class Price:
    """Compared field by field.

    Args:
        rewritten: mutated operands that would have to be moved and written back.
        total: bytes that each rank sends, about, now and for what follows from it: results that are pending
            will be finished, what was scattered will be gathered.
        work: the share of the whole computation that each rank does.
        moves: operands that change their placement.
        bytes: those that are sent now.
    """

    rewritten: int
    total: int
    work: float
    moves: int
    bytes: int

    @property
    def free(self) -> bool:
        """Whether nothing has to be sent."""
        return self.rewritten == 0 and self.bytes == 0


def move_bytes(source: Placement, target: Placement, size: int, n: int) -> int:
    """Bytes that each of n ranks sends to change the placement of a tensor of `size` bytes on one axis.

    Slicing what is whole and embedding it into a pending sum send nothing; a reduce-scatter and a gather
    send (n-1)/n of the tensor, an all-reduce both, an all-to-all 1/n of that.
    """
    if source == target or source.is_replicated or n == 1:
        return 0
    size = max(size, n * n)  # an empty tensor too: what is chosen must not depend on who has rows
    share = size * (n - 1) // n
    if source.is_pending:
        return share if target.is_partition else 2 * share
    return share // n if target.is_partition else share


def following_bytes(have: Placement, want: Placement, size: int, n: int, kept: int = 0) -> int:
    """Bytes that each rank will send because of a move: what was pending and is scattered, is gathered.

    One more than that, so that of two ways that send as much the one that leaves whole values is taken; less
    by the gathers of operands that stay cut on this axis, `kept` bytes in all: those made the result cut.
    Finished values are kept, for two readers on the average.
    """
    if n == 1 or not have.is_pending:
        return 0
    share = max(size, n * n) * (n - 1) // n
    if want.is_partition:
        return max(0, share + 1 - kept * (n - 1) // n)
    return -share if want.is_replicated else 0


def finishing_bytes(made: Placement | None, size: int, n: int) -> int:
    """Bytes that each rank will send to finish a result."""
    if made is None or not made.is_pending or n == 1:
        return 0
    return 2 * (max(size, n * n) * (n - 1) // n)


def moved_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor when it moves: an expanded one moves as what it was expanded from."""
    own = (size for size, stride in zip(info.shape, info.stride, strict=True) if stride or not size)
    return prod(own) * info.dtype.itemsize


class Transfers:
    """What one operand costs to move over all axes: what another axis keeps cut is that much smaller.

    Args:
        source: its placement on each mesh axis.
        info: its shape and dtype.
        sizes: size of each mesh axis.
        order: mesh axes in the order in which they are applied.
    """

    __slots__ = ("_known", "_order", "_shape", "_sizes", "_source", "bytes", "pending")

    def __init__(
        self, source: Sequence[Placement], info: TensorInfo, sizes: Sequence[int], order: Sequence[int]
    ) -> None:
        self._source = source
        self._shape = info.shape
        self.bytes = moved_bytes(info)
        self.pending = any(placement.is_pending for placement in source)
        self._sizes = sizes
        self._order = order
        self._known: dict[tuple[Placement | None, ...], int] = {}

    def alone(self, axis: int, want: Placement) -> int:
        """Bytes that each rank sends to change one axis, as if the tensor were cut on no other."""
        sent = move_bytes(self._source[axis], want, self.bytes, self._sizes[axis])
        target = [*self._source]
        target[axis] = want
        return sent + sum(self._disturbed(axis, target))

    def joint(self, target: tuple[Placement | None, ...]) -> int:
        """Bytes that each rank sends for these placements. Where one is None: the least, whatever it becomes.

        The least: the axis sends nothing, and cuts what the others send.
        """
        known = self._known.get(target)
        if known is None:
            known = self._known[target] = self._send(target)
        return known

    def following(self, target: Sequence[Placement], kept: Sequence[int]) -> int:
        """Bytes that each rank will send later because of these placements. kept: see `following_bytes`."""
        cut = prod(n for want, n in zip(target, self._sizes, strict=True) if want.is_partition)
        total = 0
        for have, want, n, own in zip(self._source, target, self._sizes, kept, strict=True):
            if have.is_pending and have is not want:
                others = cut // n if want.is_partition else cut
                total += following_bytes(have, want, self.bytes // max(1, others), n, own)
        return total

    def most_discount(self) -> int:
        """The most by which what follows makes the moves cheaper, on all axes together."""
        pairs = zip(self._source, self._sizes, strict=True)
        return sum(-following_bytes(have, _WHOLE, self.bytes, n) for have, n in pairs)

    def _send(self, target: tuple[Placement | None, ...]) -> int:
        pairs = list(zip(self._source, target, self._sizes, strict=True))
        cut = prod(n for _, want, n in pairs if want is None or want.is_partition)
        total = 0
        for axis, (have, want, n) in enumerate(pairs):
            if want is not None and have is not want and have != want:
                others = cut // n if want.is_partition else cut
                total += move_bytes(have, want, self.bytes // max(1, others), n)
                total += sum(self._disturbed(axis, target)) // max(1, others)
        return total

    def _disturbed(self, axis: int, target: Sequence[Placement | None]) -> Iterator[int]:
        """What a change of one axis makes later axes send that keep their cut of the same dim.

        A row that was on coord 1 of tp may be on coord 0 once dp cuts the rows first.
        """
        want = target[axis]
        if want is None:
            return
        for later in self._order[self._order.index(axis) + 1 :]:
            kept = self._source[later]
            if kept.is_partition and kept == target[later]:
                n = self._sizes[later]
                touched = self._touched(kept, n)
                if touched & (self._touched(want, n) | self._touched(self._source[axis], n)):
                    yield max(self.bytes, n * n) * (n - 1) // n // n

    def _touched(self, placement: Placement, n: int) -> set[int]:
        return set(placement.touched_dims(self._shape, n)) if isinstance(placement, Partition) else set()


def layout_bytes(source: Layout, target: Layout) -> int:
    """Bytes that each rank sends, about, from one layout of a tensor to another on the same mesh."""
    info = TensorInfo(source.shape, source.stride, source.dtype)
    return Transfers(source.placements, info, source.sizes, source.order).joint(target.placements)
