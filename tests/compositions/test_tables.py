"""Three and four strategies by one table; `python -m tests.compositions.tables_sweep` tries all of them."""

import pytest

from tests.compositions.tables import (
    CONTEXT,
    EXPERT,
    FSDP,
    HSDP,
    QUADRUPLES,
    REPLICATE,
    SEQUENCE,
    TENSOR,
    TRIPLES,
    VARIANTS,
    world_of,
)
from tests.compositions.tables_ranks import train
from tests.tiers import only

SETS = (*TRIPLES, *QUADRUPLES)
KEPT = [(REPLICATE, FSDP, TENSOR, EXPERT)]


@pytest.mark.parametrize("strategies", only([SETS.index(s) for s in KEPT], range(len(SETS))))
def test_steps_are_those_of_one_device(ranks, strategies):
    """The first learns, the second does what was learned, with other rows, the third from what it made."""
    chosen = SETS[strategies]
    variant = VARIANTS[strategies % len(VARIANTS)]
    world = world_of(chosen)
    assert ranks(world, train, chosen, variant, steps=3, timeout=120) == [[]] * world


@pytest.mark.parametrize("planted", ["twice", "unsummed"])
def test_a_planted_fault_is_seen(ranks, planted):
    chosen = (REPLICATE, TENSOR, SEQUENCE)
    found = ranks(world_of(chosen), train, chosen, VARIANTS[0], planted, steps=1)
    assert any("gradient blocks.0.up.weight by" in text or "still pending" in text for text in found[0])


def test_there_are_twenty_triples_and_five_quadruples_on_at_most_eight_ranks():
    assert len({frozenset(s) for s in TRIPLES}) >= 20
    assert len({frozenset(s) for s in QUADRUPLES}) >= 5
    assert {len(s) for s in TRIPLES} == {3}
    assert {len(s) for s in QUADRUPLES} == {4}
    assert max(map(world_of, SETS)) <= 8
    assert {name for s in SETS for name in s} == {REPLICATE, FSDP, HSDP, TENSOR, SEQUENCE, CONTEXT, EXPERT}
