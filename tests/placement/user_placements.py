"""Placements that the library has never seen: each is its meaning, and nothing else knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shardwright.errors import PlacementError
from shardwright.placement import Box, Partition, Pending, Region


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
