"""Every shipped placement fulfils every law."""

from __future__ import annotations

import pytest

from shardwright.placement import (
    BlockCyclic,
    Interleaved,
    Owner,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    ZigZag,
)
from shardwright.testing.check_placement import check_placement

SHIPPED: tuple[Placement, ...] = (
    Replicate(),
    Shard(0),
    Shard(-1),
    Interleaved(0, 2),
    Interleaved(1, 3),
    ZigZag(0),
    ZigZag(1),
    BlockCyclic(0, 1),
    BlockCyclic(-1, 2),
    Owner(0),
    Owner(2),
    Ragged((3,)),
    Ragged((1, 2)),
    Ragged((0, 1, 3), (1,)),
    Ragged((2, 0, 1), (0, 1)),
    Ragged((1, 1, 1), (0, 2)),
    Ragged((1, 0, 1), (1, 2)),
    *(Partial(op) for op in ("sum", "avg", "max", "min", "product", "norm2", "band", "bor", "bxor")),
)


@pytest.mark.parametrize("placement", SHIPPED, ids=lambda placement: placement.text())
def test_a_shipped_placement_fulfils_every_law(placement: Placement) -> None:
    check_placement(placement)
