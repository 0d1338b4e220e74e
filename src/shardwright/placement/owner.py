"""`Owner(coord)`: one coord holds everything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.errors import PlacementError
from shardwright.index.region import Region, Shape
from shardwright.index.runs import total
from shardwright.placement.base import HeldBy, Partition, check_counts

# On longer axes nobody looks for a coord that holds everything.
_FEW_COORDS = 4096


@dataclass(frozen=True, repr=False, init=False)
class Owner(Partition):
    """`coord` holds the whole tensor; every other coord an empty one of shape (0, *shape[1:]).

    Args: coord: 0 or larger; a layout asks that its axis has it.
    Raises: PlacementError: it is no such number.
    """

    undivided = True

    coord: int

    def __init__(self, coord: int) -> None:
        object.__setattr__(self, "coord", coord)
        if type(coord) is not int or coord < 0:
            check_counts(self.text(), 0, coord=coord)

    def region(self, shape: Shape, n: int, coord: int) -> Region:  # noqa: ARG002 - the same for every axis size
        """Everything or nothing."""
        return Region.whole(shape) if coord == self.coord else Region((), (0, *shape[1:]))

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:  # noqa: ARG002 - the same for every axis size
        """`shape`, or `shape` with no row; (0,) for a 0-d tensor."""
        return shape if coord == self.coord else (0, *shape[1:])

    def cut_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - the same for every shape
        """None: a coord holds every index or no element at all."""
        return ()

    def touched_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - the same for every axis size
        """Dim 0, which is empty on the other coords."""
        return (0,) if shape else ()

    def on_dim(self, dim: int) -> Owner:  # noqa: ARG002 - an owner has no dim
        """Itself."""
        return self

    @classmethod
    def names(cls, held: HeldBy, length: int, n: int) -> Iterable[Owner]:
        """A coord that holds everything."""
        if not length or n > _FEW_COORDS:
            return ()
        return (cls(coord) for coord in range(n) if total(held(coord)) == length)

    def even(self, shape: Shape, n: int) -> bool:
        """Only on an axis of size 1, or when dim 0 is empty."""
        return n == 1 or (bool(shape) and shape[0] == 0)

    def validate(self, shape: Shape, n: int) -> None:  # noqa: ARG002 - any tensor will do
        """The axis must have the coord."""
        if self.coord >= n:
            raise PlacementError(f"{self.text()}: the axis has coords 0 to {n - 1}")

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return f"Owner({self.coord})"
