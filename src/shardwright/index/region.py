"""What one coord holds of a tensor: boxes in local order, and the local shape.

Not a slice (a region may have many pieces), not data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from shardwright.errors import PlacementError
from shardwright.index.runs import Runs, interval, intervals, total

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A block of indices: `offset[d] <= index[d] < offset[d] + size[d]` on every dim."""

    offset: Shape
    size: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from a tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))


class Region:
    """The elements of one coord: `boxes` in list order, each row-major, are the local tensor row-major.

    Args: boxes, in indices of the tensor that the placement was given; empty ones are dropped.
        local_shape: shape of the local tensor; it has as many elements as the boxes.
    A region that is a product of one index list per dim knows it as `runs` (see `from_runs`), and then makes
    its boxes only when asked: they may be many (the columns of a tall matrix), the runs are few.
    """

    __slots__ = ("_boxes", "local_shape", "runs")

    _boxes: tuple[Box, ...] | None
    local_shape: Shape
    runs: tuple[Runs, ...] | None

    def __init__(self, boxes: Iterable[Box], local_shape: Sequence[int]) -> None:
        self._boxes = tuple(box for box in boxes if box.numel)
        self.local_shape = tuple(local_shape)
        self.runs = _runs_of_box(self._boxes, self.local_shape)

    @classmethod
    def from_runs(cls, runs: tuple[Runs, ...], local_shape: Shape | None = None) -> Region:
        """The product of one list of runs per dim; the local shape is their lengths."""
        self = cls.__new__(cls)
        self._boxes = None
        self.runs = runs
        self.local_shape = tuple(map(total, runs)) if local_shape is None else local_shape
        return self

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        """All of a tensor of this shape."""
        return cls((Box((0,) * len(shape), shape),), shape)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes, none of them empty."""
        if self._boxes is None:
            self._boxes = _boxes_of_runs(self.runs or (), self.local_shape)
        return self._boxes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.local_shape)

    @property
    def bounding_box(self) -> Box | None:
        """The region as one box, or None when it is not one (an empty region is not)."""
        return self.boxes[0] if self.numel and len(self.boxes) == 1 else None

    def __eq__(self, other: object) -> bool:
        """Equal: the same elements in the same local order, cut into the same boxes."""
        if not isinstance(other, Region):
            return NotImplemented
        return self.local_shape == other.local_shape and self.boxes == other.boxes

    def __hash__(self) -> int:
        return hash((self.local_shape, self.boxes))

    def __repr__(self) -> str:
        return f"Region(boxes={self.boxes}, local_shape={self.local_shape})"

    def __reduce__(self) -> tuple[type[Region], tuple[tuple[Box, ...], Shape]]:
        return Region, (self.boxes, self.local_shape)


def _runs_of_box(boxes: tuple[Box, ...], local_shape: Shape) -> tuple[Runs, ...] | None:
    """One box whose shape is the local shape is a product of intervals."""
    if len(boxes) == 1 and boxes[0].size == local_shape:
        return tuple(interval(o, o + s) for o, s in zip(boxes[0].offset, boxes[0].size, strict=True))
    return None


def _boxes_of_runs(runs: tuple[Runs, ...], local_shape: Shape) -> tuple[Box, ...]:
    """Row-major boxes: dims before the last dim that is in pieces are walked index by index."""
    if prod(local_shape) == 0:
        return ()
    pieces = [tuple(intervals(of_dim)) for of_dim in runs]
    last = max((dim for dim, of_dim in enumerate(pieces) if len(of_dim) > 1), default=0)
    singles = [[(o + i, 1) for o, s in of_dim for i in range(s)] for of_dim in pieces[:last]]
    return tuple(
        Box(tuple(o for o, _ in cell), tuple(s for _, s in cell))
        for cell in product(*singles, *pieces[last:])
    )


def flat_boxes(shape: Shape, low: int, high: int) -> list[Box]:
    """Elements `[low, high)` of the row-major flattening, as at most `2 * len(shape) - 1` boxes in order.

    Raises: PlacementError: the interval leaves the tensor.
    """
    if not 0 <= low <= high <= prod(shape):
        raise PlacementError(f"elements [{low}, {high}) are not inside a tensor of shape {shape}")
    return [Box(*cell) for cell in flat_cells(shape, low, high)]


def flat_cells(shape: Shape, low: int, high: int) -> list[tuple[Shape, Shape]]:
    """As `flat_boxes`, each as `(offset, size)`; the interval is not checked."""
    if low >= high:
        return []
    if len(shape) <= 1:
        return [((low,), (high - low,))] if shape else [((), ())]
    inner = prod(shape[1:])
    rest, zeros = shape[1:], (0,) * (len(shape) - 1)
    (first, head), (last, tail) = divmod(low, inner), divmod(high, inner)
    if first == last:
        return [((first, *o), (1, *s)) for o, s in flat_cells(rest, head, tail)]
    cells: list[tuple[Shape, Shape]] = []
    if head:
        cells += [((first, *o), (1, *s)) for o, s in flat_cells(rest, head, inner)]
        first += 1
    if last > first:
        cells.append(((first, *zeros), (last - first, *rest)))
    return cells + [((last, *o), (1, *s)) for o, s in flat_cells(rest, 0, tail)]


def joined(boxes: list[Box]) -> list[Box]:
    """Fewer boxes with the same elements in the same order."""
    out: list[Box] = []
    for given in boxes:
        box = given
        while out and (joined := _join(out[-1], box)) is not None:
            out.pop()
            box = joined
        out.append(box)
    return out


def _join(first: Box, second: Box) -> Box | None:
    """One box for two in a row, if row-major order in it is the order of the two."""
    differ = [d for d, pair in enumerate(zip(first.offset, second.offset, strict=True)) if pair[0] != pair[1]]
    if len(differ) != 1:
        return None
    dim = differ[0]
    end = first.offset[dim] + first.size[dim]
    same = first.size[:dim] == second.size[:dim] and first.size[dim + 1 :] == second.size[dim + 1 :]
    if not same or end != second.offset[dim] or prod(first.size[:dim]) != 1:
        return None
    return Box(first.offset, (*first.size[:dim], first.size[dim] + second.size[dim], *first.size[dim + 1 :]))
