"""A placement that is no partition of the tensor on this axis is refused when it is stated, by its name."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import PlacementError
from shardwright.layout.layout import Layout
from shardwright.layout.mesh_shape import MeshShape
from shardwright.placement import (
    BlockCyclic,
    Flat,
    Fused,
    Imaged,
    Interleaved,
    Joint,
    Nested,
    Owner,
    Partial,
    Ragged,
    Replicate,
    Shard,
    Sliced,
    Spread,
    Together,
    ZigZag,
)

LENGTH = 8  # of a 1-d tensor on an axis of 2
REFUSED = [
    (Nested(((Shard(0), 2), (Shard(0), 2))), r"need an axis of size 2 x 2 = 4, this one has 2"),
    (Nested(((Shard(0), 1),)), r"need an axis of size 1 = 1, this one has 2"),
    (Nested(()), "name at least one part"),
    (Nested(((Shard(0), 0), (Shard(0), 2))), r"the axis size of S\(0\) must be an integer >= 1, got 0"),
    (Nested(((Replicate(), 2),)), r"Replicate\(\) is not a partition"),
    (Joint(Nested(((Shard(0), 2),)), (2, 2), 0), "need an axis of size 2 = 2, this one has 4"),
    (Joint(Replicate(), (2,), 0), r"Replicate\(\) is not a partition"),
    (Joint(Shard(0), (2,), 1), "an axis of size 2 is not the one meant"),
    (Flat((), Shard(0)), "name at least one dim"),
    (Flat((0,), Partial()), r"Partial\(sum\) is not a partition"),
    (Sliced(0, Shard(0), 4, 0, 1, 8), "index 7 is outside the dim of 4"),
    (Sliced(0, Shard(0), 20, 0, 0, 8), "step must be an integer >= 1, got 0"),
    (Sliced(0, Shard(0), 20, -3, 1, 8), "start must be an integer >= 0, got -3"),
    (Sliced(0, Shard(0), 20, 7, -1, 8), "step must be an integer >= 1, got -1"),
    (Sliced(0, Replicate(), 20, 7, 1, 8), r"Replicate\(\) is not a partition"),
    (Sliced(0, Nested(((Shard(0), 3),)), 20, 7, 1, 8), "need an axis of size 3"),
    (Spread(0, Shard(0), -2, -2, 2), "outer must be an integer >= 0, got -2"),
    (Together(Shard(0), 0), "each must be an integer >= 1, got 0"),
    (Together(Partial(), 2), r"Partial\(sum\) is not a partition"),
    (Spread(0, Partial(), 2, 2, 2), r"Partial\(sum\) is not a partition"),
    (Imaged(0, Shard(0), (8,), (4,)), "has not what it names"),
    (Imaged(0, Shard(0), (8,), (8,), (3,), ((1,),)), "has not what it names"),
    (Imaged(0, Shard(0), (8,), (8,), (0,), ((-1,),)), "has not what it names"),
    (Imaged(0, Shard(0), (8,), (8,), (0, 0), ((1,),)), "has not what it names"),
    (Imaged(0, Replicate(), (8,), (8,)), r"Replicate\(\) is not a partition"),
    (Owner(2), "the axis has coords 0 to 1"),
    (Fused(0, (2, 1), (1, 1, 1)), "3 unit counts for an axis of size 2"),
]


@pytest.mark.parametrize(("placement", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_no_partition_is_refused_by_name(placement, message):
    with pytest.raises(PlacementError, match=message) as caught:
        Layout(MeshShape(("x",), (2,)), [placement], (LENGTH,), dtype=torch.float32)
    assert type(placement).__name__ in str(caught.value) or "Nested" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Owner(1.0), "coord must be an integer >= 0, got 1.0"),
        (lambda: ZigZag(0.5), "dim must be an integer, got 0.5"),
        (lambda: BlockCyclic("0", 1), "dim must be an integer, got '0'"),
        (lambda: Interleaved(None, 1), "dim must be an integer, got None"),
        (lambda: Fused(None, (2, 1)), "dim must be an integer, got None"),
        (lambda: Fused(0, 3), "Fused: parts=3 is no sequence"),
        (lambda: Fused(0, (1,), "11"), "units='11' is one text, where a sequence is due"),
        (lambda: Ragged(3), "Ragged: units=3 is no sequence"),
        (lambda: Ragged((1, 2), ("a",)), "dims must be integers"),
        (lambda: Ragged.of_lengths("12"), "lengths='12' is one text, where a sequence is due"),
    ],
)
def test_what_is_no_placement_is_refused_where_it_is_made(make, message):
    """Not in the call that is given it, perhaps in another file."""
    with pytest.raises(PlacementError, match=message):
        make()
