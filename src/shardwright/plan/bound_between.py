"""The fewest elements that can cross between the ranks of two meshes."""

from __future__ import annotations

import numpy as np

from shardwright.index.shares import shared_counts
from shardwright.plan.rank_map import Part, RankMap


def least(source: RankMap, target: RankMap, *, padded: bool, by_term: bool) -> int:
    """The fewest elements that can cross between ranks, over all ranks.

    A group is a rank that wants the value or, padded, the ranks of which one must have it. Before the first
    group has an element, a message arrives for each of its terms that the group does not hold; then every
    other group that does not have it yet needs one message more.

    Args:
        source: who holds which element, or a term of it.
        target: who wants which.
        padded: one rank of a group with Pendings is enough, the others pad with an identity.
        by_term: the ranks of a group may have different terms, which stay terms; else one rank has the value.
    """
    counts = shared_counts([part.cell for part in source.parts], [part.cell for part in target.parts])
    groups = np.array(
        [len(_groups(part, padded=padded, by_term=by_term)) for part in target.parts], dtype=np.int64
    )
    strangers = source.terms + groups - 1  # where no rank is in both parts
    total = int((counts * strangers).sum())
    common = {
        (place.part, target.place_of[rank].part)
        for rank, place in source.place_of.items()
        if rank in target.place_of
    }
    for i, j in common:
        needed = messages(source.parts[i], target.parts[j], padded=padded, by_term=by_term)
        total += int(counts[i, j]) * (needed - int(strangers[j]))
    return total


def _groups(target: Part, *, padded: bool, by_term: bool) -> tuple[tuple[int, ...], ...]:
    return target.groups if padded or by_term else tuple((rank,) for rank in target.ranks)


def messages(source: Part, target: Part, *, padded: bool, by_term: bool) -> int:
    """For one element that is in both parts; see `least`."""
    terms, groups = len(source.groups[0]), _groups(target, padded=padded, by_term=by_term)
    if by_term:
        holders = [frozenset(source.holders(term)) for term in range(terms)]
        missing = [sum(held.isdisjoint(group) for held in holders) for group in groups]
    else:
        everybody = frozenset(source.ranks)
        missing = [terms - (0 if everybody.isdisjoint(group) else 1) for group in groups]
    first = min(missing)
    return first + sum(1 for amount in missing if amount) - (1 if first else 0)
