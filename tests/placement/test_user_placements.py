"""A placement that the library has never seen is its meaning and nothing else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Placement as TorchPlacement

from shardwright.errors import PlacementError
from shardwright.placement import Box, Partition, Pending, Region, as_placement
from shardwright.testing.check_placement import check_placement


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


USERS = [PermutedRows(7), Band(), Checkerboard(2), LogSumExp(2)]


@pytest.mark.parametrize("placement", USERS, ids=lambda placement: type(placement).__name__)
def test_a_users_placement_fulfils_the_laws(placement):
    check_placement(placement, axis_sizes=(1, 2, 3))


@pytest.mark.parametrize("placement", USERS, ids=lambda placement: type(placement).__name__)
def test_a_users_placement_is_a_value_that_torch_accepts(placement):
    assert isinstance(placement, TorchPlacement)
    assert as_placement(placement) is placement
    assert not placement.is_shard()
    assert not placement.is_replicate()
    assert placement.is_partial() == placement.is_pending
    for made in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert made == placement
        assert hash(made) == hash(placement)
    assert placement == copy.copy(placement)
    assert PermutedRows(1) != PermutedRows(2)
    assert LogSumExp(1) != LogSumExp(2)


def test_attributes_are_set_once():
    plain = LogSumExp(2)
    with pytest.raises(AttributeError, match="frozen"):
        plain.base = 3
    with pytest.raises(AttributeError):
        PermutedRows(1).seed = 2


def test_dims_that_are_cut_follow_from_the_regions():
    assert PermutedRows(3).cut_dims((5, 4), 2) == (0,)
    assert PermutedRows(3).cut_dims((5, 4), 1) == (0,)  # permuted: not usable as if it were logical
    assert Band().cut_dims((4, 4), 2) == (0, 1)
    assert Checkerboard(2).cut_dims((4, 4), 2) == (0, 1)
    assert Checkerboard(2).cut_dims((0, 4), 2) == ()


def test_a_class_that_cannot_be_hashed_says_how_to_declare_it():
    @dataclass
    class Loose(Partition):
        seed: int

    with pytest.raises(PlacementError, match=r"declare it with @dataclass\(frozen=True\)"):
        as_placement(Loose(1))


def test_a_placement_without_its_meaning_says_which_method_is_missing():
    class Empty(Partition):
        pass

    with pytest.raises(PlacementError, match=r"Empty.*define region"):
        Empty().region((2,), 2, 0)
