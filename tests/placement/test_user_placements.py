"""A placement that the library has never seen is its meaning and nothing else."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Placement as TorchPlacement

from shardwright.errors import PlacementError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import Partition, Pending, Placement, Shard, as_placement
from shardwright.testing.check_placement import check_placement
from tests.placement.user_placements import (
    Band,
    Checkerboard,
    ColumnsByRows,
    LogSumExp,
    PermutedRows,
    RowsInTurn,
    Skewed,
)

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


class Slotted(Partition):
    __slots__ = ("seed",)

    def __init__(self, seed):
        self.seed = seed


def test_attributes_in_slots_are_attributes():
    placement = Slotted(1)
    assert placement == pickle.loads(pickle.dumps(placement)) != Slotted(2)
    assert repr(placement) == "Slotted(seed=1)"
    with pytest.raises(AttributeError, match="frozen"):
        placement.seed = 2


def test_dims_that_are_cut_follow_from_the_regions():
    assert PermutedRows(3).cut_dims((5, 4), 2) == (0,)
    assert PermutedRows(3).cut_dims((5, 4), 1) == (0,)  # permuted: not usable as if it were logical
    assert Band().cut_dims((4, 4), 2) == (0, 1)
    assert Checkerboard(2).cut_dims((4, 4), 2) == (0, 1)
    assert Skewed().cut_dims((4, 4), 2) == Skewed(halves=True).cut_dims((4, 4), 2) == (0, 1)
    assert ColumnsByRows().cut_dims((4, 4), 2) == ColumnsByRows().cut_dims((3, 7), 2) == (1,)
    assert Checkerboard(2).cut_dims((0, 4), 2) == ()


class LaidInColumns(RowsInTurn):
    def split(self, x, n, coord):
        return super().split(x, n, coord).mT.contiguous().mT


class TermsInColumns(Pending):
    def combine(self, terms):
        return sum(terms).mT.contiguous().mT

    def embed(self, x, n, coord):
        return (x if coord == 0 else torch.zeros_like(x)).mT.clone(memory_format=torch.contiguous_format).mT


def test_what_a_class_makes_lies_in_memory_as_what_it_was_given():
    """Kernels trust the strides of the whole: one that writes into a part would miss its elements."""
    rows = torch.arange(24.0).view(4, 6)
    for x in (rows, rows.t().contiguous().t()):
        in_rows = x.is_contiguous()
        for part in (
            LaidInColumns().split(x, 2, 0),
            TermsInColumns().embed(x, 2, 0),
            TermsInColumns().combine([x, x]),
            Layout(MeshShape(("tp",), (2,)), [LaidInColumns()], (4, 6), dtype=x.dtype).split(x, (1,)),
        ):
            assert (part if in_rows else part.t()).is_contiguous()
        assert torch.equal(LaidInColumns().split(x, 2, 1), RowsInTurn().split(x, 2, 1))
        assert torch.equal(TermsInColumns().combine([x, x]), x + x)
    x = rows.clone().requires_grad_()
    LaidInColumns().split(x, 2, 0).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[1.0], [0.0], [1.0], [0.0]]).expand(4, 6))


def test_a_class_that_cannot_be_hashed_says_how_to_declare_it():
    @dataclass
    class Loose(Partition):
        seed: int

    with pytest.raises(PlacementError, match=r"declare it with @dataclass\(frozen=True\)"):
        as_placement(Loose(1))


class Listed(RowsInTurn):
    """An attribute that is no value."""

    def __init__(self):
        object.__setattr__(self, "sizes", [1, 2])

    __hash__ = Partition.__hash__


class EqRaises(RowsInTurn):
    def __eq__(self, other):
        raise RuntimeError("mine")

    __hash__ = RowsInTurn.__hash__


class EqualToAll(RowsInTurn):
    def __eq__(self, other):
        return True

    __hash__ = RowsInTurn.__hash__


class EqualToNone(RowsInTurn):
    def __eq__(self, other):
        return False

    __hash__ = RowsInTurn.__hash__


@dataclass(frozen=True)
class OfATensor(RowsInTurn):
    owners: object


class OfNoFamily(Placement):
    """It says neither what coords hold nor how they are reduced."""


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (OfATensor(torch.tensor([0, 1])), r"OfATensor.owners holds a tensor.*tuple\(owners.tolist\(\)\)"),
        (OfATensor(tuple(torch.tensor([0, 1]))), r"OfATensor.owners holds a tensor"),
        (OfNoFamily(), "OfNoFamily does not say what ranks hold: subclass Partition or Pending"),
        (Listed(), "Listed is not a value.*unhashable type: 'list'.*a tuple in place of a list"),
        (EqRaises(), "EqRaises is not a value.*RuntimeError: mine"),
        (EqualToAll(), "EqualToAll is equal to a placement of another class"),
        (EqualToNone(), "EqualToNone is not equal to itself"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_table_can_hold_is_refused(placement, message):
    with pytest.raises(PlacementError, match=message):
        as_placement(placement)
    for given in ([placement, Shard(0)], {"tp": placement}):
        with pytest.raises(PlacementError, match=message):
            Layout(MeshShape(("dp", "tp"), (2, 2)), given, (4, 2), dtype=torch.float32)
    Layout(MeshShape(("dp", "tp"), (2, 2)), [RowsInTurn(), Shard(0)], (4, 2), dtype=torch.float32)


def test_a_placement_without_its_meaning_says_which_method_is_missing():
    class Empty(Partition):
        pass

    with pytest.raises(PlacementError, match=r"Empty.*define region"):
        Empty().region((2,), 2, 0)
