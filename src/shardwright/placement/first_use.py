"""What a class of somebody else's says, compared with its meaning where it is first met. Once per shape.

Only classes that are not the library's own, whose laws the tests check. Nothing is sent: every rank asks the
same questions for every coord, so that all of them refuse what one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from shardwright.errors import PlacementError, words_of
from shardwright.index.cover import no_partition
from shardwright.index.region import Region, Shape
from shardwright.placement.base import (
    Partition,
    Placement,
    Replicate,
    is_shipped_class,
    stated_by,
    undisturbed,
)
from shardwright.placement.block_cyclic import BlockCyclic
from shardwright.placement.fused import Fused
from shardwright.placement.interleaved import Interleaved
from shardwright.placement.owner import Owner
from shardwright.placement.partial import Partial
from shardwright.placement.partition_laws import (
    a_flat_group_is_one_dim,
    cut_dims_are_the_regions,
    local_length_counts_the_runs,
    local_shape_is_the_regions,
    renumbered_dims_are_the_same_split,
    resolved_means_the_same,
    split_is_the_region,
    the_gradient_of_a_part_is_that_part,
    undivided_means_one_coord,
    untouched_dims_may_be_cut_first,
    within_is_the_composed_region,
)
from shardwright.placement.ragged import Ragged
from shardwright.placement.shard import Shard
from shardwright.placement.zigzag import ZigZag
from shardwright.remember import remembered

Law = Callable[[Any, Shape, int], str | None]

# The library's own classes that are made of no other placement.
PLAIN = frozenset((Shard, Replicate, Partial, Interleaved, Fused, Ragged, Owner, ZigZag, BlockCyclic))

# What is asked of the very shape: its cost is that of the regions.
_OF_THE_SHAPE: tuple[tuple[Law, tuple[str, ...]], ...] = (
    (local_length_counts_the_runs, ("local_length",)),
    (local_shape_is_the_regions, ("local_shape", "even")),
    (cut_dims_are_the_regions, ("cut_dims", "touched_dims")),
    (a_flat_group_is_one_dim, ("flat_group",)),
)
# What is asked element by element, of a smaller tensor where this one is large.
_OF_ELEMENTS: tuple[tuple[Law, tuple[str, ...]], ...] = (
    (split_is_the_region, ("split", "join")),
    (undivided_means_one_coord, ("undivided",)),
    (within_is_the_composed_region, ("within",)),
    (untouched_dims_may_be_cut_first, ("touched_dims",)),
    (the_gradient_of_a_part_is_that_part, ("dual",)),
)
# Elements times coords up to which a tensor is small, and dims whose every order is tried.
_SMALL = 1 << 12
_FEW_DIMS = 4


@remembered(4096)
def is_own(placement: Placement) -> bool:
    """Whether its class is the library's own, and those of all placements that it is made of."""
    return is_shipped_class(type(placement)) and all(map(is_own, _inside(tuple(placement._state().values()))))


def _inside(values: tuple[Any, ...]) -> Iterator[Placement]:
    for value in values:
        if isinstance(value, Placement):
            yield value
        elif isinstance(value, tuple):
            yield from _inside(value)


def check_dims(given: Placement, resolved: Placement, shape: Shape, n: int) -> None:
    """Compare what a placement is with its dims counted from the front, and with its dims renumbered.

    Raises: PlacementError: it is another split.
    """
    if not isinstance(given, Partition) or is_shipped_class(type(given)):
        return
    if not isinstance(resolved, Partition):
        raise PlacementError(f"{named(given)}: resolved() gave {resolved!r:.200}, not a partition")
    _check_dims(given, resolved, shape, n)


@remembered(4096)
def _check_dims(given: Partition, resolved: Partition, shape: Shape, n: int) -> None:
    laws: list[tuple[Law, tuple[str, ...]]] = []
    if given is not resolved:
        laws.append((resolved_means_the_same, ("resolved", "moved")))
    if _says(given, ("on_dims",)) and len(shape) <= _FEW_DIMS:
        laws.append((renumbered_dims_are_the_same_split, ("on_dims",)))
    with undisturbed():
        small = _small(given, shape, n) if laws else None
        if small is not None:
            for law, names in laws:
                _refuse(given, names, _tried(law, given, small, n, sure=False), small, n)


@remembered(16384)
def check_partition(part: Partition, shape: Shape, n: int) -> None:
    """Compare the regions of a partition with the tensor, and what its class says beside them with them.

    Cost: O(boxes) of all coords; of a class that states more than its region, O(elements) of a small tensor.
    Raises: PlacementError: the regions are not those of a partition of such a tensor, or a method contradicts
        them.
    """
    with undisturbed():
        broken = no_partition([_region(part, shape, n, coord) for coord in range(n)], shape)
        if broken:
            raise PlacementError(
                f"{named(part)} is no partition of a tensor of shape {shape} on an axis of size {n}: {broken}"
                " (shardwright.testing.check_placement tries it on many shapes)"
            )
        if not is_shipped_class(type(part)):
            _check_statements(part, shape, n)


def _region(part: Partition, shape: Shape, n: int, coord: int) -> Region:
    try:
        return part.region(shape, n, coord)
    except PlacementError:
        raise
    except Exception as error:
        raise PlacementError(
            f"{named(part)}: region({shape}, {n}, {coord}) raised {words_of(error)}; for which "
            "tensors and axes it has no meaning is said by validate(), with a PlacementError"
        ) from error


def _check_statements(part: Partition, shape: Shape, n: int) -> None:
    for law, names in _OF_THE_SHAPE:
        if _says(part, names):
            _refuse(part, names, _tried(law, part, shape, n, sure=True), shape, n)
    of_elements = [(law, names) for law, names in _OF_ELEMENTS if _says(part, names)]
    small = _small(part, shape, n) if of_elements else None
    if small is None:
        return
    for law, names in of_elements:
        sure = small == shape and law is split_is_the_region
        _refuse(part, names, _tried(law, part, small, n, sure=sure), small, n)


def _says(part: Partition, names: tuple[str, ...]) -> bool:
    """Whether its class says one of these itself, or has it from another than the base."""
    return any(stated_by(type(part), name) not in (Partition, Placement, None) for name in names)


def _tried(law: Law, part: Partition, shape: Shape, n: int, *, sure: bool) -> str | None:
    """What a law finds; an exception counts where it is `sure` that the class is asked what it will be."""
    try:
        return law(part, shape, n)
    except Exception as error:  # noqa: BLE001 - a user's method: whatever it raises
        return f"it raised {words_of(error)}" if sure else None


def _refuse(part: Partition, names: tuple[str, ...], broken: str | None, shape: Shape, n: int) -> None:
    if broken:
        raise PlacementError(_contradiction(part, names, broken, shape, n))


def _contradiction(part: Partition, names: tuple[str, ...], broken: str, shape: Shape, n: int) -> str:
    cls = type(part)
    meaning, named_so = _states_the_meaning(cls)
    old = [name for name in names if _is_older(stated_by(cls, name), meaning)]
    fix = f"leave {' and '.join(names)} out: what the region says is found from it"
    if old:
        kept = " and ".join(f"{name} from {getattr(stated_by(cls, name), '__name__', '')}" for name in old)
        fix = (
            f"{meaning.__name__} overrides {named_so}, and inherits {kept}, which still says where the "
            "elements of that class are: override it too, or derive from sw.Partition"
        )
    return f"{named(part)} contradicts its region for shape {shape} on an axis of size {n}: {broken}; {fix}"


def _states_the_meaning(cls: type) -> tuple[type, str]:
    """The class that has the last word on what a coord holds, and by which method."""
    found = [(owner, name) for name in ("region", "runs") if (owner := stated_by(cls, name)) is not None]
    return min(found, key=lambda pair: cls.__mro__.index(pair[0]))


def _is_older(owner: type | None, meaning: type) -> bool:
    return owner not in (None, Partition, Placement) and owner in meaning.__mro__[1:]


def _small(part: Partition, shape: Shape, n: int) -> Shape | None:
    """This shape, or a smaller one that the class takes, long enough to see how it cuts; None: none is known.

    A dim that is cut keeps what is left of its length after whole rounds of all coords.
    """
    if prod(shape) * n <= _SMALL:
        return shape
    cut = set(part.cut_dims(shape, n))
    rest = tuple(size if size <= 3 * n else 2 * n + size % n for size in shape)
    for kept in (3, 1):
        small = tuple(rest[dim] if dim in cut else min(size, kept) for dim, size in enumerate(shape))
        if prod(small) * n <= 16 * _SMALL and _takes(part, small, n):
            return small
    return None


def _takes(part: Partition, shape: Shape, n: int) -> bool:
    try:
        part.validate(shape, n)
        return no_partition([part.region(shape, n, coord) for coord in range(n)], shape) is None
    except Exception:  # noqa: BLE001 - as above
        return False


def named(placement: Placement) -> str:
    """Its repr, with the class where that does not say it."""
    kind = type(placement).__name__
    try:
        said = repr(placement)
    except Exception:  # noqa: BLE001 - an error about a class must not end in that class's own
        return kind
    return said if kind in said else f"{kind} {said}"
