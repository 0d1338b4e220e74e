"""`Ragged(units, dims)`: uneven shares of a dim, or of several dims flattened. Uneven FSDP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from shardwright.errors import PlacementError, as_several
from shardwright.index.assemble import check_dim
from shardwright.index.region import Region, Shape
from shardwright.index.runs import interval, total
from shardwright.placement.base import HeldBy
from shardwright.placement.made_by_views.flat import Flat, OfFlatDims

# A list of every coord's length is a name only on axes that are no longer than this.
_SHORT_AXIS = 64


@dataclass(frozen=True, repr=False, init=False)
class Ragged(OfFlatDims):
    """The row-major flattening of `dims`, cut in units of ceil(length / sum(units)): `units[i]` for coord i.

    Consecutive, the last shares clamped at the end, so `Ragged((1,) * n, (d,))` is `Shard(d)`.
    Args: units: one count per coord, zeros allowed. dims: ascending.
    Raises: PlacementError: they are no such numbers.
    """

    units: tuple[int, ...]
    dims: tuple[int, ...]

    def __init__(self, units: Iterable[int], dims: Iterable[int] | int = (0,)) -> None:
        object.__setattr__(self, "units", counts_of("Ragged", "units", units))
        given = (dims,) if isinstance(dims, int) else dims
        fix = "a dim, or several, ascending: (0, 1)"
        object.__setattr__(self, "dims", as_several("Ragged: dims", given, PlacementError, fix=fix))
        if not self.dims:
            raise PlacementError(f"{self.text()}: name at least one dim")
        if not set(map(type, self.dims)) <= {int}:
            raise PlacementError(f"{self.text()}: dims must be integers")

    @classmethod
    def of_lengths(cls, lengths: Iterable[int], dims: Iterable[int] | int = (0,)) -> Ragged:
        """The shares of these lengths, in the largest units, so that one cut has one name."""
        lengths = counts_of("Ragged.of_lengths", "lengths", lengths)
        unit = gcd(*lengths)
        return cls((length // unit for length in lengths), dims)

    @classmethod
    def names(cls, held: HeldBy, length: int, n: int) -> Iterable[Ragged]:
        """The lengths of the coords, on short axes."""
        first = held(0)
        if n > _SHORT_AXIS or len(first) > 1 or any(run.repeat > 1 for run in first):
            return ()
        lengths = tuple(total(held(coord)) for coord in range(n))
        return (cls.of_lengths(lengths),) if sum(lengths) == length > 0 else ()

    def bounds(self, length: int, coord: int) -> tuple[int, int]:
        """Start and stop of the share of `coord` in a flattening of this length."""
        return share_bounds(self.units, length, coord)

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """The share of `coord`: an interval of the one dim, or of several flattened."""
        self.validate(shape, n)
        if len(self.dims) > 1:
            return Flat(self.dims, Ragged(self.units)).region(shape, n, coord)
        start, stop = self.bounds(self._length(shape), coord)
        kept = (interval(start, stop) if d in self.dims else interval(0, s) for d, s in enumerate(shape))
        return Region.from_runs(tuple(kept))

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:  # noqa: ARG002 - units say the axis size
        """The flat length on the last of `dims`, 1 on the others."""
        start, stop = self.bounds(self._length(shape), coord)
        return self._local_shape(shape, stop - start)

    def flat_group(self) -> tuple[int, ...]:
        """`dims`, when they are several."""
        return self.dims if len(self.dims) > 1 else ()

    def on_dim(self, dim: int) -> Ragged | None:
        """The same shares of another dim; None for a group of dims."""
        return Ragged(self.units, (dim,)) if len(self.dims) == 1 else None

    def on_dims(self, dims: dict[int, int]) -> Ragged:
        """The same shares with dims renumbered; dims that became one are named once."""
        return Ragged(self.units, sorted({dims.get(dim, dim) for dim in self.dims}))

    def resolved(self, ndim: int) -> Ragged:
        """The same shares with dims counted from the front."""
        dims = tuple(check_dim(dim, ndim, self.text()) for dim in self.dims)
        return self if dims == self.dims else Ragged(self.units, dims)

    def validate(self, shape: Shape, n: int) -> None:
        """One unit count per coord; dims that the tensor has, ascending."""
        if len(self.units) != n:
            raise PlacementError(f"{self.text()}: {len(self.units)} unit counts for an axis of size {n}")
        ndim = len(shape)
        dims = [dim if 0 <= dim < ndim else check_dim(dim, ndim, self.text()) for dim in self.dims]
        if any(second <= first for first, second in pairwise(dims)):
            raise PlacementError(f"{self.text()}: dims must be distinct and ascending")

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return f"Ragged({self.units}, {self.dims})"

    __repr__ = text


def share_bounds(units: tuple[int, ...], length: int, coord: int) -> tuple[int, int]:
    """Start and stop of the share of `coord`: its units of ceil(length / sum(units)), clamped at the end."""
    unit, start = -(-length // sum(units)), sum(units[:coord])
    return min(start * unit, length), min((start + units[coord]) * unit, length)


def counts_of(placement: str, name: str, given: Iterable[int]) -> tuple[int, ...]:
    """How many units the shares have. Raises: PlacementError: no whole numbers from 0 on, or none above 0."""
    counts = (
        tuple(given)
        if isinstance(given, tuple | list)
        else as_several(f"{placement}: {name}", given, PlacementError, fix="one whole number for each share")
    )
    if not set(map(type, counts)) <= {int} or not any(counts) or min(counts) < 0:
        raise PlacementError(
            f"{placement}: {name} must be integers, not negative and not all zero, got {counts}"
        )
    return counts
