"""`Nested`: partitions one after another, as one partition of all their axes together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwright.errors import PlacementError
from shardwright.index.region import Region, Shape
from shardwright.placement.base import Partition, check_counts, check_source


@dataclass(frozen=True, repr=False)
class Nested(Partition):
    """The first part cuts the tensor, the next one what that left, and so on: `(partition, axis size)` each.

    A coord is the row-major index of the coords on the axes, the first part's outermost.
    """

    parts: tuple[tuple[Partition, int], ...]

    def _digits(self, coord: int) -> list[int]:
        digits = []
        for _, n in reversed(self.parts):
            coord, digit = divmod(coord, n)
            digits.append(digit)
        return digits[::-1]

    def _applied(self, ndim: int) -> Iterator[tuple[Partition, int]]:
        """The parts, their dims counted in what the earlier ones left."""
        now = {dim: dim for dim in range(ndim)}
        for part, n in self.parts:
            moved = part.on_dims(now)
            yield moved, n
            group = moved.flat_group()
            now = {dim: group[-1] if at in group else at for dim, at in now.items()}

    def region(self, shape: Shape, n: int, coord: int) -> Region:
        """The last part's region, in indices of the tensor."""
        region: Region | None = None
        for (part, size), digit in zip(self._applied(len(shape)), self._digits(coord), strict=True):
            if region is None:
                region = part.region(shape, size, digit)
            elif len(region.local_shape) == len(shape):
                region = part.within(region, size, digit)
        return super().region(shape, n, coord) if region is None else region

    def local_shape(self, shape: Shape, n: int, coord: int) -> Shape:  # noqa: ARG002 - the parts say it
        """The shape that the last part leaves."""
        local = shape
        for (part, size), digit in zip(self._applied(len(shape)), self._digits(coord), strict=True):
            if len(local) == len(shape):
                local = part.local_shape(local, size, digit)
        return local

    def cut_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - the parts say it
        """The dims that any part cuts."""
        return tuple(sorted({dim for part, size in self.parts for dim in part.cut_dims(shape, size)}))

    def touched_dims(self, shape: Shape, n: int) -> tuple[int, ...]:  # noqa: ARG002 - the parts say it
        """The dims that any part touches."""
        return tuple(sorted({dim for part, size in self.parts for dim in part.touched_dims(shape, size)}))

    def flat_group(self) -> tuple[int, ...]:
        """The dims of the longest group that a part flattens."""
        return max((part.flat_group() for part, _ in self.parts), key=len, default=())

    def on_dim(self, dim: int) -> Partition | None:
        """The same cuts along another dim; None where one of them cannot be moved, or has no dim.

        Where an owner takes part, the coords that hold nothing have no rows, whatever dim is cut.
        """
        if any(part.undivided for part, _ in self.parts):
            return None
        moved = [(part.on_dim(dim), size) for part, size in self.parts]
        known = tuple((part, size) for part, size in moved if part is not None)
        return Nested(known) if len(known) == len(moved) else None

    def on_dims(self, dims: dict[int, int]) -> Partition:
        """The same cuts with dims renumbered."""
        return Nested(tuple((part.on_dims(dims), size) for part, size in self.parts))

    def resolved(self, ndim: int) -> Partition:
        """The same cuts with dims counted from the front."""
        return Nested(tuple((part.resolved(ndim), size) for part, size in self.parts))

    def text(self) -> str:
        """How the text of a layout names this placement."""
        return self._called()

    def validate(self, shape: Shape, n: int) -> None:
        """The sizes of the parts must multiply to the axis, and each part must take the tensor."""
        for part, size in self.parts:
            check_source(self.text(), part)
            check_counts(self.text(), 1, **{f"the axis size of {part}": size})
        if not self.parts:
            raise PlacementError(f"{self.text()}: name at least one part")
        coords = prod(size for _, size in self.parts)
        if coords != n:
            sizes = " x ".join(str(size) for _, size in self.parts)
            raise PlacementError(
                f"{self.text()}: its parts need an axis of size {sizes} = {coords}, this one has {n}"
            )
        for part, size in self.parts:
            part.validate(shape, size)
