"""A partition as a cut of one dim: found out from its regions, whatever its class says or leaves unsaid.

What the library's own classes say of their dims is taken as it is: the laws check it. Of any other class only
the region is believed; where its `on_dim` says something else, that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from shardwright.errors import PlacementError
from shardwright.index.assemble import derived_cut_dims
from shardwright.index.region import Shape
from shardwright.index.runs import Runs, total
from shardwright.placement.base import Partition, is_shipped_class
from shardwright.placement.made_by_views.moved import Moved
from shardwright.placement.made_by_views.nested import Nested
from shardwright.placement.one_dim import held_along, same_runs
from shardwright.remember import remembered


@remembered(4096)
def is_shipped(part: Partition) -> bool:
    """Whether its class is the library's own; of `Nested`, which says what its parts say, theirs too."""
    if not is_shipped_class(type(part)):
        return False
    return not isinstance(part, Nested) or all(is_shipped(inner) for inner, _ in part.parts)


def one_dim_form(part: Partition, shape: Shape, n: int) -> tuple[int, Partition] | None:
    """The dim that a partition cuts and the same cut of a 1-d tensor; None if it is no cut of one dim.

    Raises: PlacementError: `on_dim` contradicts the region.
    """
    if isinstance(part, Moved) and part.ndim == 1:
        return part.dim, part.source
    if not is_shipped(part):
        return _found(part, shape, n)
    cut = part.cut_dims(shape, n)
    flat = part.on_dim(0) if len(cut) == 1 else None
    if flat is None or part.on_dim(cut[0]) != part:
        return None
    return cut[0], flat


def placed_on(part: Partition, dim: int, shape: Shape, n: int) -> Partition | None:
    """The placement that cuts `dim` of a tensor of this shape like `part` cuts a 1-d tensor, if there is one.

    Raises: PlacementError: `on_dim` contradicts the region.
    """
    if is_shipped(part) and not isinstance(part, Moved):
        return part.on_dim(dim)
    return _placed(part, dim, shape, n)


def along(part: Partition, dim: int) -> Partition | None:
    """The placement that cuts `dim` of any tensor like `part` cuts a 1-d tensor, if there is one."""
    return part.on_dim(dim) if is_shipped(part) else Moved(dim, part, 1, 0)


@remembered(4096)
def _found(part: Partition, shape: Shape, n: int) -> tuple[int, Partition] | None:
    cut = derived_cut_dims(part, shape, n)
    dim = cut[0] if len(cut) == 1 else _long_dim(part, len(shape), n) if not cut else None
    if dim is None:
        return None
    full = tuple(size if at == dim else max(size, 1) for at, size in enumerate(shape))
    wanted = [held_along(part.region(full, n, coord), dim) for coord in range(n)]
    if not says(part, shape, n, dim, wanted):
        return None
    line = (shape[dim],)
    for guess in _guesses(part, 0, line, n, wanted, own=(1, len(shape))):
        if says(guess, line, n, 0, wanted):
            return dim, guess
    return None


@remembered(4096)
def _placed(part: Partition, dim: int, shape: Shape, n: int) -> Partition | None:
    line = (shape[dim],)
    wanted = [held_along(part.region(line, n, coord), 0) for coord in range(n)]
    for guess in _guesses(part, dim, shape, n, wanted, own=(1,)):
        if says(guess, shape, n, dim, wanted):
            return guess
    return None


def _guesses(
    part: Partition, dim: int, shape: Shape, n: int, wanted: list[Runs], *, own: tuple[int, ...]
) -> Iterator[Partition]:
    """Names for the cut of `dim` that `part` is, the simplest first; each is still to be compared.

    own: numbers of dims in which the class may be asked for the cut.
    """
    if isinstance(part, Moved):
        yield part.source
        yield replace(part, dim=dim)
        return
    stated = part.on_dim(dim)
    if stated is not None:
        if not says(stated, shape, n, dim, wanted):
            raise PlacementError(_contradiction(part, stated, dim, shape, n))
        yield stated
    named = _with_dim(part, dim)
    if named is not None:
        yield named
    yield part
    for ndim in dict.fromkeys(own):
        at = _long_dim(part, ndim, n)
        if at is not None:
            yield Moved(dim, part, ndim, at)


def _with_dim(part: Any, dim: int) -> Partition | None:
    """The same class with another `dim`, if it is a dataclass that has one."""
    if not is_dataclass(part) or not any(field.name == "dim" for field in fields(part)):
        return None
    named: Any = replace(part, dim=dim)  # type: ignore[type-var]
    return named if isinstance(named, Partition) else None


@remembered(4096)
def _long_dim(part: Partition, ndim: int, n: int) -> int | None:
    """The one dim that is cut where it alone is long; None where there is none, or are several."""
    found = []
    for dim in range(ndim):
        shape = tuple(2 * n + 1 if at == dim else 1 for at in range(ndim))
        try:
            part.validate(shape, n)
            cut = derived_cut_dims(part, shape, n)
        except Exception:  # noqa: BLE001 - a user's method: whatever it raises, it has no meaning here
            return None
        found += [dim] if cut else []
    return found[0] if len(found) == 1 else None


def says(part: Partition, shape: Shape, n: int, dim: int, wanted: list[Runs]) -> bool:
    """Whether each coord holds these indices of `dim`, in this order, and all of every other dim."""
    try:
        part.validate(shape, n)
        alike = all(_holds(part, shape, n, coord, dim, wanted[coord]) for coord in range(n))
        alike = alike and set(derived_cut_dims(part, shape, n)) <= {dim}
        return alike and _empties(part, shape, n, dim, wanted)
    except Exception:  # noqa: BLE001 - as above
        return False


def _empties(part: Partition, shape: Shape, n: int, dim: int, wanted: list[Runs]) -> bool:
    """Whether parts are as long along `dim` where another one is empty, as earlier axes may leave it."""
    for other in (at for at in range(len(shape)) if at != dim and shape[at]):
        empty = (*shape[:other], 0, *shape[other + 1 :])
        try:
            part.validate(empty, n)
            found = [part.region(empty, n, coord).local_shape for coord in range(n)]
        except Exception:  # noqa: BLE001 - it is refused where it is met
            continue
        if found != [(*empty[:dim], total(held), *empty[dim + 1 :]) for held in wanted]:
            return False
    return True


def _holds(part: Partition, shape: Shape, n: int, coord: int, dim: int, wanted: Runs) -> bool:
    region: Any = part.region(shape, n, coord)
    local = (*shape[:dim], total(wanted), *shape[dim + 1 :])
    if region.local_shape != local:
        return False
    return not region.numel or same_runs(held_along(region, dim), wanted)


def _contradiction(part: Partition, stated: Partition, dim: int, shape: Shape, n: int) -> str:
    return (
        f"{type(part).__name__}.on_dim({dim}) is {stated}, which cuts dim {dim} of a tensor of shape {shape} "
        f"over {n} coords in another way than the region of {part} does; "
        "leave on_dim out, it is found from the region, or run shardwright.testing.check_placement"
    )
