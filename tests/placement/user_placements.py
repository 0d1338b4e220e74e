"""Placements that the library has never seen: each is its meaning, and nothing else knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shardwright.errors import PlacementError
from shardwright.placement import Box, Partition, Pending, Region, Shard


@lru_cache
def _permutation(seed, rows):
    return np.random.RandomState(seed).permutation(rows).tolist()


@dataclass(frozen=True)
class PermutedRows(Partition):
    """A random permutation of the rows, dealt out in even shares."""

    seed: int

    def region(self, shape, n, coord):
        rows = _permutation(self.seed, shape[0])[coord::n]
        boxes = [Box((row, *(0 for _ in shape[1:])), (1, *shape[1:])) for row in rows]
        return Region(boxes, (len(rows), *shape[1:]))

    def validate(self, shape, n):
        if not shape:
            raise PlacementError("PermutedRows needs a dim")


@dataclass(frozen=True)
class Band(Partition):
    """Coord i holds the elements (r, c) with (r + c) % n == i, flat, on the last dim."""

    def region(self, shape, n, coord):
        rows, columns = shape
        boxes = [Box((r, c), (1, 1)) for r in range(rows) for c in range(columns) if (r + c) % n == coord]
        return Region(boxes, (1, len(boxes)))

    def validate(self, shape, n):
        if len(shape) != 2:
            raise PlacementError("Band is for matrices")


@dataclass(frozen=True)
class Checkerboard(Partition):
    """Tiles of a matrix dealt out in turn, each stored row-major, one after the other."""

    tile: int

    def region(self, shape, n, coord):
        t = self.tile
        tiles = [(r, c) for r in range(0, shape[0], t) for c in range(0, shape[1], t)]
        sizes = [(min(t, shape[0] - r), min(t, shape[1] - c)) for r, c in tiles]
        boxes = [
            Box(at, size) for i, (at, size) in enumerate(zip(tiles, sizes, strict=True)) if i % n == coord
        ]
        return Region(boxes, (1, sum(box.numel for box in boxes)))

    def validate(self, shape, n):
        if len(shape) != 2:
            raise PlacementError("Checkerboard is for matrices")


@dataclass(frozen=True)
class Skewed(Partition):
    """Of each row another block of columns, as in Cannon's product; rows whole where columns do not divide.

    Each row and the number of columns are as under a plain cut of columns, which it is not. `halves` states
    the same in other boxes, cut in two in every second row.
    """

    halves: bool = False

    def region(self, shape, n, coord):
        if shape[1] % n:
            return Shard(0).region(shape, n, coord)
        width = shape[1] // n
        boxes = []
        for row in range(shape[0]):
            first, half = (coord + row) % n * width, width // 2
            if self.halves and row % 2 and half:
                boxes += [Box((row, first), (1, half)), Box((row, first + half), (1, width - half))]
            else:
                boxes.append(Box((row, first), (1, width)))
        return Region(boxes, (shape[0], width))

    def validate(self, shape, n):
        if len(shape) != 2:
            raise PlacementError("Skewed is for matrices")


@dataclass(frozen=True)
class SkewedOrNot(Skewed):
    """It says that it cuts columns alone."""

    def cut_dims(self, shape, n):
        return (0,) if shape[1] % n else (1,)


@dataclass(frozen=True)
class ColumnsByRows(Partition):
    """A plain cut of columns, stated in a box for each row, some of them in two."""

    def region(self, shape, n, coord):
        size = Shard(1).local_length(shape[1], n, coord)
        first = sum(Shard(1).local_length(shape[1], n, before) for before in range(coord))
        boxes = []
        for row in range(shape[0] if size else 0):
            half = size // 2 if row % 2 else 0
            boxes += [Box((row, first), (1, half))] if half else []
            boxes.append(Box((row, first + half), (1, size - half)))
        return Region(boxes, (shape[0], size))

    def validate(self, shape, n):
        if len(shape) != 2:
            raise PlacementError("ColumnsByRows is for matrices")


@dataclass(frozen=True)
class ElementsBackwards(Partition):
    """All elements from the last to the first, one below the other: of one column a cut of rows.

    An empty part is empty in dim 0, whichever dim of the tensor is.
    """

    def region(self, shape, n, coord):
        cells, one = list(np.ndindex(*shape))[::-1], (1,) * len(shape)
        mine = cells[len(cells) * coord // n : len(cells) * (coord + 1) // n]
        return Region([Box(at, one) for at in mine], (len(mine), *one[1:]))

    def validate(self, shape, n):
        if not shape:
            raise PlacementError("ElementsBackwards needs a dim")


class LogSumExp(Pending):
    """Not a dataclass: attributes set in a plain __init__, which does not call the base."""

    def __init__(self, base):
        self.base = base

    def combine(self, terms):
        return torch.logsumexp(torch.stack(terms), 0)

    def embed(self, x, n, coord):
        return x.clone() if coord == 0 else torch.full_like(x, -torch.inf)

    def in_domain(self, x):
        return x.dtype in (torch.float32, torch.float64)

    tolerance = 4


@dataclass(frozen=True)
class RowsInTurn(Partition):
    """Coord i of n holds rows i, i + n, i + 2n, ...; says nothing but its region."""

    def region(self, shape, n, coord):
        rows = range(coord, shape[0], n)
        boxes = [Box((row, *[0] * (len(shape) - 1)), (1, *shape[1:])) for row in rows]
        return Region(boxes, (len(rows), *shape[1:]))

    def validate(self, shape, n):
        if not shape:
            raise PlacementError("RowsInTurn needs a tensor with rows")


@dataclass(frozen=True)
class Backwards(Partition):
    """Pieces of a dim, the last one on coord 0 and each from its end to its start. Region only."""

    dim: int

    def region(self, shape, n, coord):
        piece, size = -(-shape[self.dim] // n), shape[self.dim]
        mine = range(min((n - coord) * piece, size) - 1, min((n - coord - 1) * piece, size) - 1, -1)
        before = list(np.ndindex(*shape[: self.dim]))
        after, zeros = shape[self.dim + 1 :], (0,) * (len(shape) - self.dim - 1)
        boxes = [Box((*at, i, *zeros), (*(1,) * self.dim, 1, *after)) for at in before for i in mine]
        return Region(boxes, (*shape[: self.dim], len(mine), *after))

    def validate(self, shape, n):
        if not 0 <= self.dim < len(shape):
            raise PlacementError(f"Backwards has no dim {self.dim} here")


@dataclass(frozen=True)
class Columns(Partition):
    """The columns of a matrix in turn; has no meaning for anything but a matrix, and does not say so."""

    def region(self, shape, n, coord):
        rows, columns = shape
        mine = range(coord, columns, n)
        boxes = [Box((row, column), (1, 1)) for row in range(rows) for column in mine]
        return Region(boxes, (rows, len(mine)))


@dataclass(frozen=True)
class LongerDim(Partition):
    """Cuts rows or columns, whichever are more: which dim it is depends on the shape."""

    def region(self, shape, n, coord):
        dim = 0 if shape[0] >= shape[1] else 1
        return Shard(dim).region(shape, n, coord)

    def validate(self, shape, n):
        if len(shape) != 2:
            raise PlacementError("LongerDim is for matrices")


class WrongOnDim(RowsInTurn):
    """Says that along another dim it is a plain cut, which it is not."""

    def on_dim(self, dim):
        return Shard(dim)


class WrongElsewhere(RowsInTurn):
    """Right along its own dim, wrong along others."""

    def on_dim(self, dim):
        return self if dim == 0 else Shard(dim)
