"""What a save does, from what all ranks hold; known again while no rank's tensors change their layouts."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from shardwright.checkpoint.agree import Call, rank
from shardwright.checkpoint.pieces import Cell
from shardwright.checkpoint.spread import Digests, Held_by_key, Share, shares_of, union
from shardwright.remember import memo

_MOST = 4
# By the rank of this process, which may be another one in a group that is made anew, and a digest of what all
# hold.
_known: dict[tuple[int, str], Plan] = memo("plans of saves", {})


class Plan(NamedTuple):
    """Who holds and who writes what.

    Args: parts: what each rank holds. whole: each tensor, as one of them describes it. shares: what this rank
        writes. copies: of each box that several ranks hold, the key and these ranks.
    """

    parts: tuple[Held_by_key, ...]
    whole: Held_by_key
    shares: tuple[Share, ...]
    copies: tuple[tuple[str, tuple[int, ...]], ...]


class Told(NamedTuple):
    """What a rank says first: digests of what it holds and of copies in it, and the plans that it knows."""

    held: str
    copies: Digests
    known: tuple[str, ...]


def tell(held: Held_by_key, copies: Digests) -> Told:
    """A rank's first word, short where it holds no copies."""
    described = pickle.dumps(list(held.items()))
    mine = rank()
    known = tuple(key for of_rank, key in _known if of_rank == mine)
    return Told(xxhash.xxh3_128_hexdigest(described), copies, known)


def planned(told: Sequence[Told], held: Held_by_key, call: Call) -> Plan:
    """The plan of what all ranks hold. A collective of a call.

    Raises: CheckpointError: as `union`, on every rank.
    Cost: nothing is communicated where all ranks know the plan; else one gather of descriptions.
    """
    key = xxhash.xxh3_128_hexdigest(" ".join(one.held for one in told).encode())
    digests = [one.copies for one in told]
    if all(key in one.known for one in told):
        plan = _known[rank(), key]
        if any(len({digests[r].get(name) for r in ranks}) > 1 for name, ranks in plan.copies):
            union(plan.parts, digests)  # which says what differs
        return plan
    plan = plan_of(call.agreed("describing the state", lambda: held), digests)
    if len(_known) >= _MOST:
        del _known[next(iter(_known))]
    _known[rank(), key] = plan
    return plan


def plan_of(parts: Sequence[Held_by_key], digests: Sequence[Digests]) -> Plan:
    """The same decision on every rank, without another word between them.

    Raises: CheckpointError: as `union`.
    """
    whole = union(parts, digests)
    holders: dict[tuple[str, tuple[Cell, ...]], list[int]] = {}
    for number, part in enumerate(parts):
        for name, one in part.items():
            holders.setdefault((name, one.boxes), []).append(number)
    copies = [(name, tuple(ranks)) for (name, boxes), ranks in holders.items() if boxes and len(ranks) > 1]
    return Plan(tuple(parts), whole, tuple(shares_of(parts, rank())), tuple(copies))
