"""Every shipped placement fulfils every law."""

from __future__ import annotations

import contextlib

import pytest

from shardwright.errors import PlacementError
from shardwright.placement import (
    BlockCyclic,
    Flat,
    Fused,
    Imaged,
    Interleaved,
    Joint,
    Moved,
    Nested,
    Owner,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Sliced,
    Spread,
    Together,
    ZigZag,
)
from shardwright.testing.check_placement import check_placement, shapes
from tests.tiers import one_in

SHIPPED: tuple[Placement, ...] = (
    Replicate(),
    Shard(0),
    Shard(-1),
    Interleaved(0, 2),
    Interleaved(1, 3),
    ZigZag(0),
    ZigZag(1),
    Fused(0, (2, 1, 1)),
    Fused(1, (3, 0, 1)),
    Fused(0, (2, 1), (1, 0, 2)),
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
    Flat((0,), Shard(0)),
    Flat((1, 0), ZigZag(0)),
    Flat((0, 2), Ragged((1, 2))),
    Imaged(0, Shard(1), (2, 4), (4, 2)),
    Imaged(0, Ragged((1, 2), (0, 1)), (3, 4), (4, 5), (0, 1), ((0, 1), (1, 0))),
    Joint(Shard(0), (2,), 0),
    Joint(Nested(((Shard(0), 2), (Shard(0), 2))), (4,), 0),
    Moved(1, Shard(0), 1, 0),
    Nested(((Shard(0), 3), (Shard(1), 1))),
    Nested(((Shard(1), 1), (Owner(0), 2))),
    Nested(((ZigZag(0), 2), (Ragged((2,), (0, 1)), 1))),
    Sliced(0, Shard(0), 20, 3, 2, 5),
    Sliced(1, BlockCyclic(0, 2), 9, 1, 1, 8),
    Spread(0, ZigZag(0), 2, 2, 3),
    Spread(1, Shard(0), 2, 4, 1),
    Together(Ragged((2, 1, 0, 1, 1, 3), (0,)), 2),
    Together(Ragged((2, 1, 0, 1, 1, 3), (0, 1)), 2),
    Together(Interleaved(1, 2), 3),
    *(Partial(op) for op in ("sum", "avg", "max", "min", "product", "norm2", "band", "bor", "bxor")),
)


@pytest.mark.parametrize("placement", one_in(2, SHIPPED), ids=lambda placement: placement.text())
def test_a_shipped_placement_fulfils_every_law_on_one_axis(placement: Placement) -> None:
    """Of size 3, which divides few of the shapes, or the one that the placement needs."""
    accepted = next(n for n in (3, *range(1, 33)) if _accepts(placement, n))
    check_placement(placement, axis_sizes=(accepted,))


def _accepts(placement: Placement, n: int) -> bool:
    for shape in shapes():
        with contextlib.suppress(PlacementError):
            placement.resolved(len(shape)).validate(shape, n)
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("placement", SHIPPED, ids=lambda placement: placement.text())
def test_a_shipped_placement_fulfils_every_law(placement: Placement) -> None:
    check_placement(placement)
