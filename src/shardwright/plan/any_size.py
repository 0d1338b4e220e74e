"""What a rank does in a plan for sizes that are symbols: the numbers in it as polynomials of them.

A plan is made for numbers. Among sizes that leave the same rest where the ranks divide them, its numbers are
linear in each size that plain placements cut: so it is made for a few sizes, which say the polynomials, and
for others, near and far, which must agree. What it decides by sizes (do terms go whole?) is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from itertools import compress, product
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np

from shardwright.index.overlap import Strided
from shardwright.layout.layout import Layout
from shardwright.layout.text import plain_cut
from shardwright.plan.by_axis import plans_by_axis
from shardwright.plan.decide import one_round_bytes, plan_as_asked
from shardwright.plan.exchange import Exchange
from shardwright.plan.plan import Plan
from shardwright.plan.work import Apply, Memory, Move, Reduction, Seat, Share, Transfer, Work

_FAR = (1009, 2003, 4001, 8009, 16007, 32003, 64007)  # no two dims are equally long there
_INSIDE = (Memory, Move, Reduction, Share, Transfer)


class Sized(NamedTuple):
    """A plan for some sizes; for the symbols, the shape that a rank has before it, and what the rank does."""

    plan: Plan
    shape: tuple[Any, ...]
    works: tuple[Work, ...]


class _DifferError(Exception):
    """The plans of several sizes are not one."""


def plans_for(source: Layout, target: Layout, sizes: Sequence[Any], seat: Seat) -> list[Sized] | None:
    """How a rank gets from one layout to another of these sizes in a graph, one axis after the other.

    Args: sizes: of the tensor, of which some are symbols; the sizes of the layouts are not read.
    Returns: None where only plans for numbers can tell.
    """
    changes = [*zip(source.placements, target.placements, source.sizes, strict=True)]
    if any(p.is_partition and plain_cut(p) is None for before, after, _ in changes for p in (before, after)):
        return None
    for finer in (
        1,
        prod(n for before, after, n in changes if before != after),
    ):  # a middle may be cut further
        try:
            return _plans_for(source, target, sizes, seat, finer)
        except _DifferError:
            continue
    return None


def _plans_for(source: Layout, target: Layout, sizes: Sequence[Any], seat: Seat, finer: int) -> list[Sized]:
    symbols = [dim for dim, size in enumerate(sizes) if type(size) is not int]
    periods = [finer * _parts(source, target, dim) for dim in symbols]
    rests = [int(sizes[dim] % n) for dim, n in zip(symbols, periods, strict=True)]
    times = [sizes[dim] // n for dim, n in zip(symbols, periods, strict=True)]
    least = [
        n if rest else 1 for n, rest in zip(periods, rests, strict=True)
    ]  # from there on all ranks have some
    if (
        source.kind is None
        or target.kind is None
        or any(n < few for n, few in zip(times, least, strict=True))
    ):
        raise _DifferError
    examples = _examples([max(2, n) for n in least])  # dims of length 1 are in no view
    shapes = [list(sizes) for _ in examples]
    for shape, example in zip(shapes, examples, strict=True):
        for dim, *parts in zip(symbols, periods, example, rests, strict=True):
            shape[dim] = parts[0] * parts[1] + parts[2]
    pairs = [[Layout.of_kind(kind, tuple(shape)) for kind in (source.kind, target.kind)] for shape in shapes]
    value, in_one_round = partial(_value, examples, times), None
    asked = [plan_as_asked(*pair, in_one_round=True).steps[:1] for pair in pairs]
    if all(step and isinstance(step[0], Exchange) and step[0].terms for step in asked):
        moved = value([step.moved for (step,) in asked])
        in_one_round = bool(moved * source.itemsize <= one_round_bytes() * prod(source.sizes))
    plans = [plan_as_asked(*pair, in_one_round=in_one_round) for pair in pairs]
    ways = [[(one.source, one.target) for one in plans_by_axis(plan)] for plan in plans]
    if (
        len({(plan.form, *[(a.kind, b.kind) for a, b in way]) for plan, way in zip(plans, ways, strict=True)})
        > 1
    ):
        raise _DifferError
    if len(ways[0]) > 1:
        return [plan for pair in ways[0] for plan in _plans_for(*pair, sizes, seat, finer)]
    before = [plan.source.local_shape(cast("tuple[int, ...]", seat)) for plan in plans]
    works = [tuple([step.work(seat) for step in plan.steps]) for plan in plans]
    return [Sized(plans[0], _as_one(before, value), _as_one(works, value))]


def _parts(source: Layout, target: Layout, dim: int) -> int:
    """In how many a dim is cut, on both sides."""
    pairs = zip(source.placements, target.placements, source.sizes, strict=True)
    return prod(n for before, after, n in pairs if dim in (plain_cut(before), plain_cut(after)))


def _examples(least: Sequence[int]) -> list[tuple[int, ...]]:
    """Two numbers for each symbol in any combination, which say a polynomial; then others."""
    near = [tuple([n + more for n in least]) for more in (2, 3)]
    return [*product(*[(n, n + 1) for n in least]), *near, _FAR[: len(least)], _FAR[-len(least) :]]


def _value(examples: Sequence[tuple[int, ...]], times: Sequence[Any], values: Sequence[int]) -> Any:
    """At `times` of what has these values at the examples and is linear in each number.

    Raises: _DifferError: nothing is.
    """
    factors = np.array(values[: 2 ** len(times)]).reshape((2,) * len(times))
    for axis, least in enumerate(examples[0]):
        low, high = np.split(factors, 2, axis)
        factors = np.concatenate([low - (high - low) * least, high - low], axis)
    terms = [*zip(factors.ravel().tolist(), product((0, 1), repeat=len(times)), strict=True)]

    def at(numbers: Sequence[Any]) -> Any:
        return sum([factor * prod(compress(numbers, chosen)) for factor, chosen in terms if factor])

    if any(at(example) != value for example, value in zip(examples, values, strict=True)):
        raise _DifferError
    return at(times)


def _as_one(works: Sequence[Any], value: Callable[[Sequence[int]], Any]) -> Any:
    """What has one form in all plans, with the value of the numbers in which they differ."""
    first = works[0]
    if type(first) is int and any(each != first for each in works):
        return value(works)
    if isinstance(first, tuple) and all(len(each) == len(first) for each in works):
        parts = tuple([_as_one(part, value) for part in zip(*works, strict=True)])
        return Strided(*parts) if isinstance(first, Strided) else parts
    if isinstance(first, _INSIDE) and all(type(each) is type(first) for each in works):
        return type(first)(*[_as_one([getattr(w, f.name) for w in works], value) for f in fields(first)])
    if not isinstance(first, Apply) and any(
        each != first for each in works
    ):  # equal steps apply one function
        raise _DifferError
    return first
