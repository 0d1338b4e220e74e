"""Regions in which neighbouring dims are one flat dim: what `Ragged` of several dims and cuts after it hold.

Not a list of boxes until somebody asks for them: composing works on a few runs, whatever the rows in between.
"""

from __future__ import annotations

from itertools import chain, product
from math import prod

from shardwright.index.assemble import unravel
from shardwright.index.region import Box, Region, Shape, flat_cells, joined
from shardwright.index.runs import Runs, compose, interval, intervals, total

Cell = tuple[Shape, Shape]


class FlatRegion(Region):
    """The product of index lists of a tensor whose dims `first` to `last` are flattened into one.

    Args: shape: of the tensor. folded: one list of runs per dim of the folded tensor.
    The local tensor has 1 on the flattened dims but the last, which has the flat length.
    """

    __slots__ = ("first", "folded", "last", "shape")

    shape: Shape
    first: int
    last: int
    folded: tuple[Runs, ...]

    def __init__(self, shape: Shape, first: int, last: int, folded: tuple[Runs, ...]) -> None:
        self.shape, self.first, self.last, self.folded = shape, first, last, folded
        lengths = [total(runs) for runs in folded]
        self.local_shape = (*lengths[:first], *(1,) * (last - first), *lengths[first:])
        self.runs = None
        self._boxes = None

    def then(self, inner: Region) -> FlatRegion | None:
        """What `inner`, in local indices of this region, stands for; None where boxes must say it.

        `inner` is a product of runs, or flat itself over the flat dim and whole dims after it.
        """
        if inner.runs is not None:
            folded = (*inner.runs[: self.first], *inner.runs[self.last :])
            return self._composed(self.last, self.folded, folded)
        if not isinstance(inner, FlatRegion) or not self._holds_whole(inner):
            return None
        scale = prod(self.shape[self.last + 1 : inner.last + 1])
        rest = self.first + 1 + inner.last - self.last
        flat = tuple(
            run._replace(offset=scale * run.offset, size=scale * run.size, stride=scale * run.stride)
            for run in self.folded[self.first]
        )
        outer = (*self.folded[: self.first], flat, *self.folded[rest:])
        return self._composed(inner.last, outer, (*inner.folded[: self.first], *inner.folded[inner.first :]))

    def cut(self, dim: int, inner: Runs) -> FlatRegion:
        """The local indices `inner` of a dim that is not one of the dims of size 1."""
        at = dim - self.last + self.first if dim >= self.last else dim
        composed = compose(self.folded[at], inner)
        return FlatRegion(
            self.shape, self.first, self.last, (*self.folded[:at], composed, *self.folded[at + 1 :])
        )

    def _composed(self, last: int, outer: tuple[Runs, ...], inner: tuple[Runs, ...]) -> FlatRegion:
        return FlatRegion(self.shape, self.first, last, tuple(map(compose, outer, inner)))

    def _holds_whole(self, inner: FlatRegion) -> bool:
        """Whether the group of `inner` is this one and dims after it that this region does not cut."""
        after = range(self.last + 1, inner.last + 1)
        return self.first <= inner.first <= self.last <= inner.last and all(
            self.folded[dim - self.last + self.first] == interval(0, self.shape[dim]) for dim in after
        )

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes, none of them empty; made when they are first asked for."""
        if self._boxes is None:
            self._boxes = self._made_boxes() if self.numel else ()
        return self._boxes

    def _made_boxes(self) -> tuple[Box, ...]:
        """Row-major: dims before the last one that is in pieces are walked index by index."""
        pieces = [self._pieces(dim) for dim in range(len(self.folded))]
        last = max((dim for dim, of_dim in enumerate(pieces) if len(of_dim) > 1), default=0)
        singles = [self._singles(dim) for dim in range(last)]
        cells = (list(zip(*each, strict=True)) for each in product(*singles, *pieces[last:]))
        boxes = [Box(tuple(chain(*offsets)), tuple(chain(*sizes))) for offsets, sizes in cells]
        return tuple(joined(boxes) if len(boxes) > 1 else boxes)

    def _pieces(self, dim: int) -> list[Cell]:
        if dim != self.first:
            return [((offset,), (size,)) for offset, size in intervals(self.folded[dim])]
        group = self.shape[self.first : self.last + 1]
        runs = intervals(self.folded[dim])
        return [cell for offset, size in runs for cell in flat_cells(group, offset, offset + size)]

    def _singles(self, dim: int) -> list[Cell]:
        indices = (at for offset, size in intervals(self.folded[dim]) for at in range(offset, offset + size))
        if dim != self.first:
            return [((at,), (1,)) for at in indices]
        group = self.shape[self.first : self.last + 1]
        return [(unravel(at, group), (1,) * len(group)) for at in indices]
