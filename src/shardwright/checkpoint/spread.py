"""Who writes what: a box that several ranks hold is written once, and large ones are cut between them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from shardwright.checkpoint.pieces import Cell, Held
from shardwright.checkpoint.storage.element_types import ITEMSIZES
from shardwright.checkpoint.storage.proof import why_not_once
from shardwright.errors import CheckpointError

_WORTH_CUTTING = 1 << 20  # bytes that each of the ranks then writes

Held_by_key = dict[str, Held]
Digests = dict[str, str]  # by key


class Share(NamedTuple):
    """Box number `box` of those that this rank holds of a tensor; of it, rows [start, stop) of dim `dim`."""

    key: str
    box: int
    cell: Cell
    dim: int
    start: int
    stop: int


def union(parts: Sequence[Held_by_key], digests: Sequence[Digests]) -> Held_by_key:
    """Each tensor as the lowest rank that has it describes it.

    Raises: CheckpointError: ranks have different tensors of one name, hold elements twice or not at all, or
    hold different values where they should hold the same.
    """
    whole: Held_by_key = {}
    boxes: dict[str, dict[Cell, None]] = {}
    copies: dict[tuple[str, tuple[Cell, ...]], int] = {}
    for rank, part in enumerate(parts):
        for key, held in part.items():
            first = whole.setdefault(key, held)
            if held is not first and (held[:2] + held[3:] != first[:2] + first[3:] or held.layout is None):
                _compare(key, first, held, rank, parts, digests)
            other = copies.setdefault((key, held.boxes), rank)
            if digests[other].get(key) != digests[rank].get(key):
                raise CheckpointError(_differing_copies(key, held, other, rank))
            boxes.setdefault(key, {}).update(dict.fromkeys(held.boxes))
    for key, held in whole.items():
        reason = why_not_once(held.shape, tuple(boxes[key]))
        if reason:
            raise CheckpointError(f"{key}: {reason} (how the ranks hold it: {held.layout or 'plain'})")
    return whole


def _compare(
    key: str, first: Held, held: Held, rank: int, parts: Sequence[Held_by_key], digests: Sequence[Digests]
) -> None:
    other = next(number for number, part in enumerate(parts) if part.get(key) == first)
    if held[:2] != first[:2]:
        raise CheckpointError(f"{key} is {first} on rank {other} but {held} on rank {rank}")
    if (held.layout is None) != (first.layout is None):
        raise CheckpointError(
            f"{key} is a DTensor on one of the ranks {other} and {rank} and plain on the other"
        )
    if held.ranks != first.ranks and not _is_copy(key, first, held, rank, parts, digests):
        raise CheckpointError(
            f"{key} is another tensor on the mesh of ranks {list(first.ranks)} than on that of "
            f"{list(held.ranks)}: give them names of their own (that of the stage, for instance)"
        )
    if held.layout is None and digests[rank].get(key) != digests[other].get(key):
        raise CheckpointError(
            f"{key} is a plain tensor whose values differ between ranks {other} and {rank}, so there is no "
            "one value to save: make it equal first (torch.distributed.broadcast, or a mean over the ranks), "
            "make it a DTensor, or leave it out of the state"
        )


def _differing_copies(key: str, held: Held, other: int, rank: int) -> str:
    return (
        f"{key} is laid out as {held.layout}, so ranks {other} and {rank} should hold the same elements, but "
        "they hold different ones and there is no one value to save: make the copies equal first "
        "(torch.distributed.broadcast of x.to_local()), and look for what let them drift apart"
    )


def _is_copy(
    key: str, first: Held, held: Held, rank: int, parts: Sequence[Held_by_key], digests: Sequence[Digests]
) -> bool:
    """Whether what a rank holds is held, bit for bit, by a rank of the other mesh."""
    there = [
        (part[key].boxes, told.get(key))
        for part, told in zip(parts, digests, strict=True)
        if key in part and part[key].ranks == first.ranks
    ]
    return not held.boxes or (held.boxes, digests[rank].get(key)) in there


def shares_of(parts: Sequence[Held_by_key], rank: int) -> list[Share]:
    """What one rank writes; the same decision on every rank, without another word between them.

    What only one rank holds it writes. Of the rest, large boxes are cut into as many rows as there are
    holders; small ones go, the largest first, to the holder that has least.
    """
    holders: dict[tuple[str, Cell], list[tuple[int, int]]] = {}
    for number, part in enumerate(parts):
        for key, held in part.items():
            for at, box in enumerate(held.boxes):
                holders.setdefault((key, box), []).append((number, at))
    load = [0] * len(parts)
    mine: list[Share] = []
    shared: list[tuple[int, tuple[str, Cell], list[tuple[int, int]]]] = []
    whole = {key: held.dtype for part in parts for key, held in part.items()}
    for (key, box), held_by in holders.items():
        nbytes = prod(box[1]) * ITEMSIZES[whole[key]]
        if len(held_by) > 1:
            shared.append((nbytes, (key, box), held_by))
            continue
        load[held_by[0][0]] += nbytes
        if held_by[0][0] == rank:
            mine.append(_whole(key, box, held_by[0][1]))
    for nbytes, (key, box), held_by in sorted(shared, key=lambda one: -one[0]):
        mine += _shared(nbytes, key, box, held_by, load, rank)
    return mine


def _shared(
    nbytes: int, key: str, box: Cell, held_by: list[tuple[int, int]], load: list[int], rank: int
) -> list[Share]:
    dim = _dim_to_cut(box[1], len(held_by)) if nbytes >= _WORTH_CUTTING * len(held_by) else None
    if dim is None:
        writer, at = min(held_by, key=lambda one: load[one[0]])
        load[writer] += nbytes
        return [_whole(key, box, at)] if writer == rank else []
    rows, found = box[1][dim], []
    for turn, (holder, at) in enumerate(held_by):
        start, stop = turn * rows // len(held_by), (turn + 1) * rows // len(held_by)
        load[holder] += nbytes * (stop - start) // rows
        if holder == rank:
            found.append(_rows(key, box, at, dim, start, stop))
    return found


def _dim_to_cut(size: Sequence[int], ways: int) -> int | None:
    """The first dim that is no 1, if it has enough rows: its rows lie one after another."""
    dim = next((d for d, s in enumerate(size) if s > 1), None)
    return dim if dim is not None and size[dim] >= ways else None


def _whole(key: str, box: Cell, at: int) -> Share:
    return Share(key, at, box, 0, 0, box[1][0] if box[1] else 1)


def _rows(key: str, box: Cell, at: int, dim: int, start: int, stop: int) -> Share:
    offset, size = list(box[0]), list(box[1])
    offset[dim] += start
    size[dim] = stop - start
    return Share(key, at, (tuple(offset), tuple(size)), dim, start, stop)
