"""The simplest placement that says what a cut holds: every guess is compared with it on every coord."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod

import numpy as np

from shardwright.errors import PlacementError
from shardwright.index.region import Shape
from shardwright.index.runs import Runs, compose, intervals, total
from shardwright.placement.base import Partition
from shardwright.placement.block_cyclic import BlockCyclic
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.made_by_views.flat import Flat
from shardwright.placement.made_by_views.imaged import Imaged
from shardwright.placement.made_by_views.joint import Joint
from shardwright.placement.made_by_views.nested import Nested
from shardwright.placement.made_by_views.sliced import Sliced
from shardwright.placement.made_by_views.spread import Spread
from shardwright.placement.one_dim import held, runs_of_indices, same_runs
from shardwright.placement.one_dim_form import along
from shardwright.placement.owner import Owner
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.placement.zigzag import ZigZag
from shardwright.remember import remembered

HeldBy = Callable[[int], Runs]

# Whose names are tried, the simplest first; those that a view makes of are simpler than the last four.
_SIMPLEST_FIRST: tuple[type[Partition], ...] = (Shard, Owner, Ragged, Interleaved, BlockCyclic, ZigZag)
# What views make, and what anything else is simpler than.
_MADE_BY_VIEWS = (Imaged, Nested, Sliced, Spread)
# Axes of at most this many coords together are taken apart into one placement per axis.
_FEW_COORDS = 4096


@remembered(4096)
def simplest(part: Partition, length: int, n: int) -> Partition:
    """The simplest partition of a 1-d tensor that holds what `part` does."""
    if not isinstance(part, _MADE_BY_VIEWS):
        plain = Shard(0)
        same = all(same_runs(held(plain, length, n, c), held(part, length, n, c)) for c in range(n))
        return plain if same else part
    return named(lambda coord: held(part, length, n, coord), length, n, part) or part


def named(held_by: HeldBy, length: int, n: int, known: Partition | None = None) -> Partition | None:
    """The name of a cut, if it has one that is simpler than `known`."""
    for guess in _guesses(held_by, length, n, known):
        with suppress(PlacementError):  # a guess may have no meaning for this length
            if all(same_runs(held(guess, length, n, coord), held_by(coord)) for coord in range(n)):
                return guess
    return None


def _guesses(held_by: HeldBy, length: int, n: int, known: Partition | None) -> Iterator[Partition]:
    for kind in _SIMPLEST_FIRST[:2]:
        yield from kind.names(held_by, length, n)
    if isinstance(known, Sliced):
        if isinstance(known.source, Spread):  # of another length it is what it spreads, under a longer name
            yield known.source.source
        yield known.source
        if isinstance(known.source, Sliced):
            yield _one_slice(known, known.source)
    if isinstance(known, Spread):
        yield known.source
    own = dict.fromkeys(map(type, _made_of(known)))
    for kind in _SIMPLEST_FIRST[2:]:
        yield from kind.names(held_by, length, n)
    for kind in own:
        if kind not in _SIMPLEST_FIRST:
            yield from _offered(kind, held_by, length, n)


def _offered(kind: type[Partition], held_by: HeldBy, length: int, n: int) -> Iterator[Partition]:
    """What the class of the source offers; what is no partition of this length is no name.

    Nor is there one where `names` raises: a subclass inherits one that calls another constructor.
    """
    with suppress(Exception):  # a user's method: whatever it raises
        for guess in list(kind.names(held_by, length, n)):
            if _has_regions(guess, length, n):
                yield guess


def _has_regions(guess: object, length: int, n: int) -> bool:
    try:
        return isinstance(guess, Partition) and all(held(guess, length, n, c) or True for c in range(n))
    except Exception:  # noqa: BLE001 - as above
        return False


def _made_of(part: Partition | None) -> Iterator[Partition]:
    """The cuts of which what views make consists."""
    if isinstance(part, Nested):
        for inner, _ in part.parts:
            yield from _made_of(inner)
    elif isinstance(part, Imaged | Sliced | Spread):
        yield from _made_of(part.source)
    elif part is not None:
        yield part


def _one_slice(outer: Sliced, inner: Sliced) -> Partition:
    """A slice of a slice as one slice."""
    start, step = inner.start + outer.start * inner.step, outer.step * inner.step
    return Sliced(0, inner.source, inner.of, start, step, outer.length)


# ------------------------------------------------------------------------------------ several tensor dims


@remembered(4096)
def settled(part: Partition, sizes: Shape, n: int) -> tuple[tuple[int, ...], Partition]:
    """The fewest neighbouring dims of a tensor of these sizes that `part`, a cut of its flattening, cuts.

    Returns: the dims, and the cut of their flattening; no dims where one coord has everything.
    """
    dims = [dim for dim, size in enumerate(sizes) if size != 1]
    for count in range(1, len(dims) + 1):
        for at in range(len(dims) - count + 1):
            group = tuple(range(dims[at], dims[at + count - 1] + 1))
            core = _core(part, sizes, group, n)
            if core is not None:
                return group, core
    # Nothing but dims of size 1: the last of them, as good as any.
    return (len(sizes) - 1,), simplest(part, prod(sizes), n)


def _core(part: Partition, sizes: Shape, group: tuple[int, ...], n: int) -> Partition | None:
    """The cut of a group of dims that `part` is on the flattening of all, if it leaves the others whole."""
    outer, inner = prod(sizes[: group[0]]), prod(sizes[group[-1] + 1 :])
    size, length = prod(sizes[dim] for dim in group), prod(sizes)
    if outer == inner == 1:
        return simplest(part, length, n)
    core = simplest(Sliced(0, part, length, 0, inner, size), size, n)
    again = Spread(0, core, outer, size, inner)
    try:
        same = all(same_runs(held(again, length, n, c), held(part, length, n, c)) for c in range(n))
    except PlacementError:  # too many pieces to write down: then it is not this one
        return None
    return core if same else None


def on_dims(part: Partition, dims: tuple[int, ...]) -> Partition:
    """The placement that cuts these dims of a tensor, flattened, like `part` cuts a 1-d tensor."""
    whole = along(part, dims[0]) if len(dims) == 1 or part.undivided else None
    if whole is not None:
        return whole
    ascending = all(after > before for before, after in pairwise(dims))
    if ascending and isinstance(part, Ragged):
        return Ragged(part.units, dims)
    return Flat(dims, part)


# ---------------------------------------------------------------------------------------- several axes


def per_axis(part: Partition, length: int, sizes: tuple[int, ...]) -> tuple[Partition, ...] | None:
    """One partition of a 1-d tensor for each axis, applied one after another, that hold what `part` does.

    None where what an axis holds depends on the coords on the others.
    """
    n = prod(sizes)
    if len(sizes) == 1:
        return (simplest(part, length, n),)
    if n > _FEW_COORDS:
        return _if_same((Shard(0),) * len(sizes), part, length, sizes)
    return _taken_apart(lambda coord: held(part, length, n, coord), length, sizes)


def _if_same(
    parts: tuple[Partition, ...], part: Partition, length: int, sizes: tuple[int, ...]
) -> tuple[Partition, ...] | None:
    n = prod(sizes)
    nested = Nested(tuple(zip(parts, sizes, strict=True)))
    same = all(same_runs(held(nested, length, n, c), held(part, length, n, c)) for c in range(n))
    return parts if same else None


def _taken_apart(held_by: HeldBy, length: int, sizes: tuple[int, ...]) -> tuple[Partition, ...] | None:
    """The first axis holds what its coords hold together; the others must cut that alike on each of them."""
    first, rest = sizes[0], sizes[1:]
    if not rest:
        found = named(held_by, length, first)
        return None if found is None else (found,)
    inner = prod(rest)

    def together(coord: int) -> Runs:
        pieces = [held_by(coord * inner + c) for c in range(inner)]
        indices = [at for runs in pieces for low, size in intervals(runs) for at in range(low, low + size)]
        return runs_of_indices(sorted(indices))

    outer = named(together, length, first)
    if outer is None:
        return None
    left = [held(outer, length, first, coord) for coord in range(first)]
    guesses: dict[tuple[Partition, ...], None] = {}
    for coord in range(first):
        if left[coord]:
            local = _inside(held_by, left[coord], coord * inner, inner)
            inside = _taken_apart(local, total(left[coord]), rest)
            if inside is not None:
                guesses[inside] = None
    for guess in guesses or {(Shard(0),) * len(rest): None}:
        if all(_alike(guess, rest, left[coord], held_by, coord * inner) for coord in range(first)):
            return outer, *guess
    return None


def _inside(held_by: HeldBy, runs: Runs, start: int, count: int) -> HeldBy:
    """The same cut of what one coord of the outer axis has, in its local indices."""
    indices = np.concatenate([np.arange(low, low + size) for low, size in intervals(runs)])
    order = np.argsort(indices, kind="stable")

    def local(coord: int) -> Runs:
        wanted = [np.arange(low, low + size) for low, size in intervals(held_by(start + coord))]
        if not wanted or coord >= count:
            return ()
        found = order[np.searchsorted(indices[order], np.concatenate(wanted))]
        return runs_of_indices(found.tolist())

    return local


def _alike(
    parts: tuple[Partition, ...], sizes: tuple[int, ...], left: Runs, held_by: HeldBy, start: int
) -> bool:
    """Whether these partitions of what an outer coord has hold what is wanted."""
    nested = Nested(tuple(zip(parts, sizes, strict=True)))
    length, n = total(left), prod(sizes)
    try:
        nested.validate((length,), n)
    except PlacementError:
        return False
    return all(same_runs(compose(left, held(nested, length, n, c)), held_by(start + c)) for c in range(n))


def distributed(
    part: Partition, sizes: Shape, dims: tuple[int, ...], axes: Sequence[int]
) -> tuple[Partition, ...]:
    """One placement per axis for a cut of all axes together of the flattening of `dims`, of these sizes."""
    n = prod(axes)
    group, core = settled(part, sizes, n)
    where = tuple(dims[at] for at in group)
    length = prod(sizes[at] for at in group)
    if len(axes) == 1:
        return (on_dims(core, where),)
    apart = per_axis(core, length, tuple(axes))
    if apart is not None:
        return tuple(on_dims(p, where) for p in apart)
    together = on_dims(core, where)
    return tuple(Joint(together, tuple(axes), index) for index in range(len(axes)))


def owners(coord: int, axes: Sequence[int]) -> tuple[Partition, ...]:
    """One `Owner` per axis: the coord is the row-major index over all axes."""
    digits = []
    for n in reversed(axes):
        coord, digit = divmod(coord, n)
        digits.append(digit)
    return tuple(Owner(digit) for digit in reversed(digits))


def coord_of(part: Partition, length: int, n: int, index: int) -> int:
    """The coord that holds an index of a 1-d tensor.

    Raises: PlacementError: none does, so `part` is no partition.
    """
    for coord in range(n):
        if any(low <= index < low + size for low, size in intervals(held(part, length, n, coord))):
            return coord
    raise PlacementError(f"{part}: no coord holds index {index} of {length}")
