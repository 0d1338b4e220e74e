"""Slow and fast axes: what crosses the slow ones, the least that must, and rounds that keep to it.

A direct exchange sends an element over the slow link once for every rank of a node that wants it, and every
term of a sum from every rank that has one. Gathered over the slow axes first, and reduced over the fast axes
first, it crosses once per node; the bytes in all are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from shardwright.plan.exchange import Exchange
from shardwright.plan.holders import Map, MixedMap
from shardwright.plan.pending import commute
from shardwright.plan.shared import meet
from shardwright.plan.step import Step
from shardwright.plan.steps import Combine
from shardwright.plan.work import TermsOf

MakeExchange = Callable[..., Exchange]


def slow_bound(
    source: Map, target: Map, reduced: Sequence[int], kept: Sequence[int], slow: frozenset[int]
) -> int:
    """The fewest elements that can cross the slow axes: the lower bound with nodes in place of ranks."""
    sizes = source.sizes
    copies = prod(sizes[axis] for axis in kept)
    counted = slow - frozenset(kept)
    terms = prod(sizes[axis] for axis in reduced if axis in slow)
    wanting = prod(sizes[axis] for axis in counted - target.cut)
    equal = prod(sizes[axis] for axis in counted - target.cut - source.cut)
    common = np.ones((1,) * len(sizes), dtype=np.int64)
    for mine, theirs in zip(source.lines, target.lines, strict=True):
        axes = frozenset(mine.at) & slow, frozenset(theirs.at) & slow
        common = common * meet(mine, theirs).count(*axes, sizes)
    if terms == 1:
        return copies * (target.elements * wanting - equal * int(common.sum()))
    return copies * (target.elements * (terms - 1 + wanting) - int(common.sum()))


def by_level(
    steps: Sequence[Step], slow: frozenset[int], make: MakeExchange, reduced: tuple[TermsOf, ...]
) -> list[Step]:
    """The same steps, an exchange in two where less crosses the slow axes then and no more in all."""
    out: list[Step] = []
    rest = list(steps)
    while rest:
        step = rest.pop(0)
        if isinstance(step, Exchange) and step.terms:
            halves = _reduced_by_level(step, slow, make, reduced)
            if halves:
                rest.pop(0)  # the combination of all terms at once
            out += halves or [step]
        elif isinstance(step, Exchange):
            out += _gathered_by_level(step, slow, make) or [step]
        else:
            out.append(step)
    return out


def _gathered_by_level(step: Exchange, slow: frozenset[int], make: MakeExchange) -> list[Step]:
    """Slow axes first: each rank of a node fetches a part, which the node then shares."""
    source, target = step.source, step.target
    here = frozenset(step.axes) - slow
    if not here or not slow & frozenset(step.axes):
        return []
    middle = MixedMap(source, target, source.cut - target.cut - slow, ())
    halves = [make(source, middle), make(middle, target)]
    return list(halves) if _better(halves, step, slow) else []


def _reduced_by_level(
    step: Exchange, slow: frozenset[int], make: MakeExchange, reduced: tuple[TermsOf, ...]
) -> list[Step]:
    """Fast axes first: a node combines its own terms, and one of each goes to other nodes."""
    near = tuple(item for item in reduced if item.axis not in slow)
    far = tuple(item for item in reduced if item.axis in slow)
    if not near or not far or not commute(reduced):
        return []
    source, target = step.source, step.target
    middle = MixedMap(source, target, source.cut & slow, (), target.cut - slow)
    halves = [make(source, middle, [of.axis for of in near]), make(middle, target, [of.axis for of in far])]
    if not _better(halves, step, slow):
        return []
    return [halves[0], Combine(near), halves[1], Combine(far)]


def _better(halves: Sequence[Exchange], whole: Exchange, slow: frozenset[int]) -> bool:
    if sum(half.moved for half in halves) > whole.moved:
        return False
    return sum(half.crossing(slow) for half in halves) < whole.crossing(slow)
