"""The generators that all laws share draw every placement that the library exports."""

from __future__ import annotations

import random

import pytest
from hypothesis import find

from shardwright import placement
from shardwright.placement import AlongDim, Partition, Pending, Placement
from tests.generators import placements
from tests.laws.draws import draw, kinds

# Bases, of which there are no instances.
ABSTRACT = {AlongDim, Partition, Pending, Placement}
EXPORTED = [
    kind
    for kind in (getattr(placement, name) for name in placement.__all__)
    if isinstance(kind, type) and issubclass(kind, Placement) and kind not in ABSTRACT
]


@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
def test_every_exported_placement_is_drawn(kind):
    found = find(placements(2, 2, (4, 6)), lambda drawn: type(drawn) is kind)
    assert type(found) is kind


def test_the_full_run_of_the_laws_draws_them_all():
    rng = random.Random(0)
    drawn = {type(each) for _ in range(20) for each in kinds(rng, draw(rng).full, 2)}
    assert drawn == set(EXPORTED)
