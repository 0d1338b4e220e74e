"""Torch's own placements split as ours do, and ours are theirs in every way that torch can ask."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.errors import PlacementError
from shardwright.placement import (
    Interleaved,
    Partial,
    Partition,
    Pending,
    Placement,
    Ragged,
    Replicate,
    Shard,
    as_placement,
)

PAIRS = [
    (Shard(0), TorchShard(0)),
    (Shard(3), TorchShard(3)),
    (Replicate(), TorchReplicate()),
    (Partial(), TorchPartial()),
    (Partial("max"), TorchPartial("max")),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_our_object_is_torchs_object(ours: Placement, theirs: TorchPlacement) -> None:
    assert ours == theirs
    assert theirs == ours
    assert hash(ours) == hash(theirs)
    assert isinstance(ours, type(theirs))
    assert isinstance(ours, Placement)
    assert {ours: 1}[theirs] == 1
    assert repr(ours) == repr(theirs)
    for question in ("is_shard", "is_partial", "is_replicate"):
        assert getattr(ours, question)() == getattr(theirs, question)()
    assert as_placement(theirs) == ours
    assert type(as_placement(theirs)) is type(ours)
    assert as_placement(ours) is ours


def test_families_are_told_apart() -> None:
    assert isinstance(Shard(0), Partition)
    assert isinstance(Partial(), Pending)
    assert not isinstance(Replicate(), Partition)
    assert Shard(0) != Shard(1)
    assert Shard(0) != Replicate()
    assert Partial() != Partial("avg")
    assert Shard(0) != _StridedShard(0, split_factor=2)
    assert _StridedShard(0, split_factor=2) != Shard(0)
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")


@pytest.mark.parametrize("placement", [ours for ours, _ in PAIRS] + [Interleaved(0, 2), Ragged((1, 2))])
def test_a_placement_survives_pickle_and_copy(placement: Placement) -> None:
    for made in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), copy.copy(placement)):
        assert made == placement
        assert type(made) is type(placement)
        assert hash(made) == hash(placement)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7, 12, 13])
def test_shard_cuts_like_torch(length: int, n: int) -> None:
    x = torch.arange(2 * length).reshape(2, length)
    theirs, _ = TorchShard(1)._split_tensor(x, n, with_padding=False)
    for coord in range(n):
        assert torch.equal(Shard(1).split(x, n, coord), theirs[coord])
        size, offset = TorchShard(1)._local_shard_size_and_offset(length, n, coord)
        assert Shard(1).local_shape((2, length), n, coord) == (2, size)
        boxes = Shard(1).region((2, length), n, coord).boxes
        assert not boxes or boxes[0].offset == (0, offset)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6])
def test_interleaved_cuts_like_torchs_strided_shard(chunks: int, n: int) -> None:
    strided = _StridedShard(0, split_factor=chunks)
    converted = as_placement(strided)
    assert converted == (Interleaved(0, chunks) if chunks > 1 else Shard(0))
    for length in (*range(20), 29, 48, 49):
        x = torch.arange(length)
        theirs, _ = strided._split_tensor(x, n, with_padding=False)
        assert [Interleaved(0, chunks).split(x, n, coord).tolist() for coord in range(n)] == [
            part.tolist() for part in theirs
        ], f"length {length}"


def test_ragged_of_equal_units_is_shard() -> None:
    for length in range(30):
        for n in (1, 2, 3, 5):
            for coord in range(n):
                ragged = Ragged((1,) * n, (0,)).region((length,), n, coord)
                assert ragged == Shard(0).region((length,), n, coord)


def test_torchs_private_norm_is_ours_where_the_meaning_is_the_same() -> None:
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    assert as_placement(_NormPartial(2)) == Partial("norm2")
    assert as_placement(_NormPartial(1)) == Partial("sum")
    assert as_placement(TorchPartial()) != _NormPartial(2)
    with pytest.raises(PlacementError, match=r"_NormPartial.*only torch can finish"):
        as_placement(_NormPartial(3))


def test_what_torch_keeps_private_is_refused_by_name() -> None:
    class Unknown(TorchPartial):
        pass

    with pytest.raises(PlacementError, match="Unknown"):
        as_placement(Unknown())
    with pytest.raises(PlacementError, match="is not a placement"):
        as_placement("Shard(0)")
